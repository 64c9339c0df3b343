"""Entry for several processes; does the same as ``flowalign train``.

accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train.py RECIPE key=value
"""

import sys

from flowalign.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
