"""``python -m jaxq COMMAND``: see ``jaxq/cli``."""

import sys

from jaxq.cli import main

sys.exit(main())
