"""`python -m keras_meshdist` is the command `meshdist`."""

import sys

from keras_meshdist.cli import main

sys.exit(main())
