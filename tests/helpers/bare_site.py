"""A folder of packages that has some of the installed distributions and nothing else."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def with_requirements(names):
    """Installed distributions by name, and what they need without extras."""
    found, wanted = {}, list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # needed on other systems only, or brought by the machine
            continue
        needed = [line for line in found[name].requires or () if "extra ==" not in line]
        wanted += [re.match(r"[\w.-]+", line)[0] for line in needed]
    return found


def link_distributions(site: Path, names):
    """Link into a folder what these distributions install, and what they need."""
    for each in with_requirements(names).values():
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(each.locate_file(top))
