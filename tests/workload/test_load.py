"""Finding a workload's trace: the search order, the check of what is found, and the twin."""

import pytest

from mooncake_lab.workload import DATA_VARIABLE, find_trace, load, search_folders
from mooncake_lab.workload import releases as locate


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The three places searched, in order, all empty."""
    places = [tmp_path / "named", tmp_path / "checkout" / "data" / "traces", tmp_path / "cache"]
    for place in places:
        place.mkdir(parents=True)
    (tmp_path / "checkout" / "pyproject.toml").touch()
    monkeypatch.setenv(DATA_VARIABLE, str(places[0]))
    monkeypatch.setattr(locate, "__file__", str(tmp_path / "checkout" / "package" / "workload" / "locate.py"))
    monkeypatch.setattr(locate, "cache_folder", lambda: places[2])
    return places


class TestFind:
    @pytest.mark.parametrize("first", [0, 1, 2])
    def test_order(self, folders, first):
        """The first place that has the file wins: the variable, the checkout, the cache."""
        for folder in folders[first:]:
            (folder / "mooncake_trace.jsonl").touch()
        assert find_trace("arxiv") == folders[first] / "mooncake_trace.jsonl"

    def test_nowhere(self, folders):
        """A file that is nowhere is None."""
        assert search_folders() == tuple(folders)
        assert find_trace("conversation") is None

    def test_without_variable_and_checkout(self, folders, monkeypatch):
        """An installed package without the variable searches only the cache."""
        monkeypatch.delenv(DATA_VARIABLE)
        (folders[1].parents[1] / "pyproject.toml").unlink()
        assert search_folders() == (folders[2],)

    def test_a_folder_is_no_trace(self, folders):
        """A folder with the file's name does not count."""
        (folders[0] / "conversation_trace.jsonl").mkdir()
        assert find_trace("conversation") is None

    def test_unknown(self):
        """A name that is no workload is refused."""
        with pytest.raises(ValueError, match="unknown workload 'azure'"):
            find_trace("azure")


class TestLoad:
    @pytest.mark.usefixtures("folders")
    def test_the_twin_where_nothing_is_found(self):
        """Without a file it is the twin of the seed, and says so."""
        trace = load("conversation", seed=3)
        assert (trace.name, trace.origin) == ("conversation", "twin")
        assert trace.source.startswith("twin of the conversation trace, seed 3")

    def test_another_file_of_that_name_is_refused(self, folders):
        """A file that is not the released one is an error, not a quiet substitute."""
        (folders[0] / "conversation_trace.jsonl").write_text("{}")
        with pytest.raises(ValueError, match=r"conversation_trace\.jsonl has the SHA-256"):
            load("conversation")

    @pytest.mark.parametrize("name", ["conversation", "synthetic"])
    def test_the_released_file(self, name):
        """A released file is recognised, and says so, whatever the seed."""
        if find_trace(name) is None:
            pytest.skip(f"the released {name} trace is not on this machine; name its folder in {DATA_VARIABLE}")
        trace = load(name, seed=9)
        assert (trace.name, trace.origin, trace.source) == (name, "released", f"released {name} trace")
