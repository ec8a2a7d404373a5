"""The real command ended at many points: OUT is absent or whole, and what stood there stays until the new one is."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from slowed_command import end_after

from dewconv.converters import writing
from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.exporting import export_checkpoint
from dewconv.converters.importing import import_checkpoint
from dewconv.converters.safetensors_files import FileWriter
from dewconv.converters.source import open_source
from dewconv.families import ConversionError

POINTS = 8


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("verb", ["import", "export"])
def test_out_is_the_old_one_whole_or_absent(tiny, tmp_path, how, verb):
    source = tiny.qwen3("source").path
    subprocess.run([sys.executable, "-m", "dewconv", "import", source, "banks", "-q"], cwd=tmp_path, check=True)
    total = len(open_banks(tmp_path / "banks").source_headers["model.safetensors"].entries)
    given = ("import", source) if verb == "import" else ("export", tmp_path / "banks")
    mark = "dewconv.json" if verb == "import" else "config.json"
    subprocess.run([sys.executable, "-m", "dewconv", *map(str, given), "old", "-q"], cwd=tmp_path, check=True)
    before = tiny.files_of(tmp_path / "old")
    for point in range(POINTS):
        writes = 1 + point * total // POINTS
        code, _ = end_after(writes, how, tmp_path, *given, "new")
        assert code in (2, -how), "it was over before the signal came"
        assert not (tmp_path / "new").exists()
        assert end_after(writes, how, tmp_path, *given, "old", "--overwrite")[0] in (2, -how)
        assert tiny.files_of(tmp_path / "old") == before
        left = [path for path in tmp_path.iterdir() if path.name not in ("source", "banks", "old")]
        # A process that is killed cannot tidy up: what it leaves is hidden, and named as unfinished.
        assert all(path.name.startswith(".") and path.name.endswith(".partial") for path in left)
        assert how == signal.SIGKILL or left == []
    subprocess.run([sys.executable, "-m", "dewconv", *map(str, given), "new", "-q"], cwd=tmp_path, check=True)
    assert (tmp_path / "new" / mark).is_file()
    assert tiny.files_of(tmp_path / "new") == before
    assert check_banks(open_banks(tmp_path / "banks")) == []


def test_a_full_disk_that_shows_while_files_are_flushed_ends_the_import(tiny, tmp_path, monkeypatch):
    source = open_source(tiny.qwen3().path)
    flushed = []

    def fail_once(self):
        flushed.append(self.path.name)
        if len(flushed) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "FLUSH_BYTES", 1)
    monkeypatch.setattr(FileWriter, "flush", fail_once)
    with pytest.raises(ConversionError, match=r"cannot be written .*No space left"):
        import_checkpoint(source, tmp_path / "out")
    assert flushed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("verb", ["import", "export"])
def test_every_byte_is_on_the_disk_before_out_is_there(tiny, tmp_path, monkeypatch, verb):
    """What a crash of the machine right after the rename would find: every file and directory was synced before it,
    and the one that holds OUT after it."""
    source = open_source(tiny.qwen3(shards=2).path)
    banks = import_checkpoint(source, tmp_path / "banks")
    out, synced, done = tmp_path / "out", [], {}
    fsync, rename = os.fsync, os.rename

    def syncing(fd):
        fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    def renaming(old, new):
        done.update({str(old): len(synced)})
        rename(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    if verb == "import":
        import_checkpoint(source, out)
    else:
        export_checkpoint(banks, out)
    ((stage, before),) = done.items()
    whole = [out, *(path for path in out.rglob("*"))]
    assert len(whole) > 10
    assert {str(path).replace(str(out), stage, 1) for path in whole} <= set(synced[:before])
    assert synced[before:] == [str(tmp_path)]
