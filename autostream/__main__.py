"""``python -m autostream`` is ``autostream``."""

import sys

from autostream.cli import main

sys.exit(main())
