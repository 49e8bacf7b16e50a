"""The version, in one place: packaging reads it from here."""

VERSION = "0.1.0"
