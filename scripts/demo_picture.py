"""Draw the output of the demo as a picture of a terminal.

tinkex demo 2>&1 | python scripts/demo_picture.py docs/pictures/demo.svg

The text is the demo's own. Lines are left out, never changed: all but a few of the progress, and what comes last.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COMMAND = "$ tinkex demo"
WIDTH = 96
#: The look of each kind of line; the first match counts.
STYLES = (
    (r"\$ ", "bold green"),
    (r"\S.*:$", "bold"),
    (r"  Q  ", "cyan"),
    (r"  A  |     ", "bright_white"),
    (r"step |Starting ", "grey58"),
    (r"Loss |.*(word for word|token by token)", "yellow"),
)
OMITTED = re.compile(r"The loss curve|Watch it|  to train on")


def shown(output: str) -> Iterator[str]:
    """The lines to show: from the start of the service to the end of the story."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Starting a service"))
    last = next(i for i, line in enumerate(lines) if "The reopened model" in line)
    progress = [line for line in lines if line.startswith("step ")]
    kept = {progress[0], progress[-1], *progress[2::3]}
    yield COMMAND
    for line in lines[first : last + 1]:
        if not OMITTED.match(line) and (line not in progress or line in kept):
            yield line


def styled(line: str) -> Text:
    style = next((style for pattern, style in STYLES if re.match(pattern, line)), "")
    return Text(line, style)


def svg(output: str) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in shown(output):
        console.print(styled(line))
    drawn = console.export_svg(title="tinkex demo", theme=MONOKAI, unique_id="demo")
    # A picture in a README cannot load fonts, so it uses those of the reader's machine.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    fonts = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
    return drawn.replace("Fira Code, monospace", fonts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.parse_args().picture.write_text(svg(sys.stdin.read()), "utf-8")


if __name__ == "__main__":
    main()
