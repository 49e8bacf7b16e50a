"""The page of a report as one self-contained HTML file: ``autostream report``."""
