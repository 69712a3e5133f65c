"""Makes the pictures of the documentation from real runs.

    python docs/make_pictures.py            # report.svg
    python docs/make_pictures.py --loss     # and loss_curves.png, a training run of some minutes

Run it again after a change of the report, from the top of the repository. Times in the picture are of the machine that
made it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme

import ascend_deep
from ascend_deep.models import load

IMG = Path(__file__).resolve().parent / "img"
THEME = TerminalTheme(
    (250, 250, 248),
    (40, 44, 52),
    [
        (40, 44, 52),
        (178, 34, 52),
        (29, 111, 95),
        (154, 103, 0),
        (36, 92, 160),
        (120, 60, 140),
        (20, 110, 130),
        (120, 120, 120),
    ],
)


def report_picture(path: Path) -> None:
    """A DeepSeek-V3 of four layers, inference, as ``ascend-deep explain deepseek_v3 --layers 4`` shows it."""
    torch.manual_seed(0)
    loaded = load("deepseek_v3", layers=4)
    with torch.no_grad():
        report = ascend_deep.explain(loaded.model, *loaded.args, **loaded.kwargs)
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(report)
    svg = console.export_svg(title="$ ascend-deep explain deepseek_v3 --layers 4", theme=THEME, unique_id="report")
    # No fonts from elsewhere: the reader's own monospace font.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", action="store_true", help="also train, for the picture of the loss curves")
    args = parser.parse_args()
    IMG.mkdir(exist_ok=True)
    report_picture(IMG / "report.svg")
    print(IMG / "report.svg")
    if args.loss:
        example = IMG.parents[1] / "examples" / "train_tiny_moe.py"
        subprocess.run([sys.executable, example, "--picture", IMG / "loss_curves.png"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
