"""The version, which packaging reads from here."""

VERSION = "0.1.0"
