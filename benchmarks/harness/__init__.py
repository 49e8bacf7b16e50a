"""Models and training steps in several modes: prepared, checked, timed in a process of their own, shown in tables."""
