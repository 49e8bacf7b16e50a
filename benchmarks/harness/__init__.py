"""The harness: models and training steps in several modes, checked, timed in a process of their own, and tabulated."""
