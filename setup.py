"""Everything about the package is in pyproject.toml; this adds `data/` to what is built."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = ("paper", "measured", "models")
"""The folders of `data/` that an installed package needs; traces are fetched."""


class BuildWithData(build_py):
    """Copies the data into the package, where `mooncake_lab.core.carried_folder` finds it without a checkout."""

    def run(self) -> None:
        """Build as ever, then copy; an editable install keeps using the checkout's own data."""
        super().run()
        if self.editable_mode:
            return
        for name in CARRIED:
            source = Path(__file__).parent / "data" / name
            target = Path(self.build_lib) / "mooncake_lab" / "data" / name
            shutil.rmtree(target, ignore_errors=True)
            if source.is_dir():
                shutil.copytree(source, target)


setup(cmdclass={"build_py": BuildWithData})
