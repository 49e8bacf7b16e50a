"""``python -m autostream`` runs the command line, as ``autostream`` does."""

import sys

from autostream.cli import main

sys.exit(main())
