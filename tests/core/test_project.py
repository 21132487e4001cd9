"""The data that travels with the project is found from a checkout and from an installed package."""

import pytest

from mooncake_lab.core import carried_folder


def test_a_checkout_has_its_data_beside_the_package(tmp_path):
    """Without data inside the package, the folder beside it counts."""
    (tmp_path / "data" / "paper").mkdir(parents=True)
    assert carried_folder("paper", tmp_path / "package") == tmp_path / "data" / "paper"


def test_an_installed_package_carries_its_own(tmp_path):
    """Data inside the package comes before any folder that happens to lie beside it."""
    (tmp_path / "data" / "paper").mkdir(parents=True)
    inside = tmp_path / "package" / "data" / "paper"
    inside.mkdir(parents=True)
    assert carried_folder("paper", tmp_path / "package") == inside


def test_missing_data_names_both_places(tmp_path):
    """What cannot be found is said with where it was looked for."""
    with pytest.raises(FileNotFoundError, match=r"'measured' data is neither in .*package.data.measured nor in"):
        carried_folder("measured", tmp_path / "package")
