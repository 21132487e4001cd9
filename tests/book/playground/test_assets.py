"""The files of the playground's page: what is not here and cannot be fetched is no error, and the page knows."""

import pytest

from mooncake_lab.book.playground import assets


def no_network(*_arguments, **_settings):
    pytest.fail("something was fetched")


@pytest.fixture
def few(monkeypatch):
    """Small traces, so that the results are stored soon."""
    monkeypatch.setattr(assets, "TWIN_REQUESTS", 20)


@pytest.mark.usefixtures("few")
def test_offline_nothing_is_fetched(tmp_path, monkeypatch, capsys):
    """One line says so, the exit status is 0, and all that is made of the source is there."""
    monkeypatch.setattr(assets, "download", no_network)
    monkeypatch.setattr(assets.subprocess, "run", no_network)
    folder = tmp_path / "page"
    assert assets.main([str(folder), "--cache", str(tmp_path / "cache"), "--offline"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("playground ")
    assert "OFFLINE is set" in line
    made = {"mooncake_lab.zip", "nodes.json", "stored.js", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == made | {f"{name}.jsonl" for name in assets.TWINS}
    assert b"playgroundComplete = false;" in (folder / "stored.js").read_bytes()


@pytest.mark.usefixtures("few")
def test_what_cannot_be_fetched_is_no_error(tmp_path, monkeypatch, capsys):
    """Without a network the line says what could not be fetched, and the book is built all the same."""

    def unreachable(*_):
        raise ConnectionError("Temporary failure in name resolution")

    monkeypatch.setattr(assets, "download", unreachable)
    assert assets.main([str(tmp_path / "page"), "--cache", str(tmp_path / "cache")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "could not fetch https://registry.npmjs.org/pyodide" in line
    assert "Temporary failure in name resolution" in line


def test_what_is_here_is_used_offline(tmp_path, monkeypatch):
    """A cache that an earlier build has filled needs no network, nor what that build wanted besides."""
    monkeypatch.setattr(assets.subprocess, "run", no_network)
    archive = tmp_path / assets.PYODIDE_URL.rpartition("/")[2]
    archive.write_bytes(b"archive")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").write_bytes(b"wheel")
    (tmp_path / "wheels" / "unwanted.whl").write_bytes(b"of an older build")
    monkeypatch.setattr(assets, "PYODIDE_SHA256", assets.file_sha256(archive))
    monkeypatch.setattr(assets, "WHEELS", {"one": assets.file_sha256(tmp_path / "wheels" / "one.whl")})
    assert assets.fetch_pyodide(tmp_path, offline=True) == archive
    assert assets.fetch_wheels(tmp_path, offline=True) == [tmp_path / "wheels" / "one.whl"]


def test_what_is_fetched_is_kept(tmp_path, monkeypatch):
    """The archive lies in the cache under its own name, and is not fetched again."""
    monkeypatch.setattr(assets, "download", lambda _address, path, _sha256: path.write_bytes(b"archive"))
    archive = assets.fetch_pyodide(tmp_path)
    assert archive == tmp_path / assets.PYODIDE_URL.rpartition("/")[2]
    monkeypatch.setattr(assets, "PYODIDE_SHA256", assets.file_sha256(archive))
    monkeypatch.setattr(assets, "download", no_network)
    assert assets.fetch_pyodide(tmp_path) == archive


def test_what_is_not_what_was_asked_for_is_an_error(tmp_path, monkeypatch, capsys):
    """A file with another digest is no matter of the network: the exit status is 1."""

    def another(*_):
        raise ValueError("SHA256 hash of downloaded file does not match")

    monkeypatch.setattr(assets, "download", another)
    assert assets.main([str(tmp_path / "page"), "--cache", str(tmp_path / "cache")]) == 1
    assert "does not match" in capsys.readouterr().err
