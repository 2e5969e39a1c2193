"""The model pair that ships with LAPS-SD: a small target and the draft distilled from it."""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"

__all__ = ["DRAFT_DIR", "TARGET_DIR"]
