"""What a check of tools/ finds in a tree of files that a test makes."""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))


def faults_in(tree, check):
    """What check(root) gives, as a set, where `tree` has the text of every file by its name."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in tree.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return set(check(root))
