"""Faces of a report: text for people, JSON for programs, DOT for Graphviz. They decide nothing."""
