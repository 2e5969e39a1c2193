"""Generates with another engine, for `laps-sd bench engine`: `OTHER_PYTHON bench/_peer_driver.py SETUP.json`.

Runs in the interpreter that has that engine, so it imports nothing but the standard library and the engine.
The setup names the task (convert, serve or steps), the engine and mode, the models, the limits, and the
prompts. After loading it prints `{"ready": VERSION}`, or `{"refused": SENTENCE}` and ends; then each line on
stdin is answered with one line (`bench/_peer_engines/loops.py`). The end of stdin ends it.

The engine works inside this process: its CPU time is that of all threads of the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def convert(setup: dict[str, Any]) -> None:
    """Convert models to the form of an engine, in the places that the setup names."""
    from bench._peer_engines import llamacpp, openvino

    for source, place in setup["models"]:
        if setup["engine"] == "llamacpp":
            llamacpp.convert(source, Path(place), setup["weights"])
        else:
            openvino.convert(
                source, Path(place), setup["tokenizer"] or source, setup["weights"], setup["group"]
            )


def load(setup: dict[str, Any]) -> Any:
    """Return the engine that the setup names."""
    from bench._peer_engines.llamacpp import LlamaCpp
    from bench._peer_engines.openvino import OpenVino
    from bench._peer_engines.ours import Ours
    from bench._peer_engines.vllm import Vllm

    return {"ours": Ours, "vllm": Vllm, "openvino": OpenVino, "llamacpp": LlamaCpp}[setup["engine"]](setup)


def main() -> None:
    """Run the engine that the setup names."""
    setup = json.loads(Path(sys.argv[1]).read_text())
    # The folder of this file would hide packages, such as that of vllm; the checkout comes after all others, and
    # before them for our own engine.
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench"]
    sys.path.insert(0 if setup["engine"] == "ours" else len(sys.path), str(ROOT))
    from bench._peer_engines.engine import Refused
    from bench._peer_engines.loops import open_channel, send, serve

    channel = open_channel()
    try:
        if setup["task"] == "convert":
            convert(setup)
            return
        engine = load(setup)
    except Refused as error:
        send(channel, {"refused": str(error)})
        return
    serve(engine, setup, channel)


if __name__ == "__main__":
    main()
