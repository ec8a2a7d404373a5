"""A source: a Hugging Face checkpoint as a config, a table of tensors and side files, read from headers alone."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

from ..families.errors import ConversionError, Finding, FindingsError, within
from .codecs import Stored, stored_tensors
from .hub import is_hub_id, snapshot
from .remote import RemoteShards
from .safetensors_files import Header, TensorEntry, is_unicode
from .shards import LocalShards, ShardFile, Shards
from .side_files import NOT_OF_IT, PICKLES, SideFile, Skipped, allowed_roots, fault_of_file, is_inside, survey

CONFIG = "config.json"
MANIFEST = "dewconv.json"
"""The file of a bank directory that says it is one."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KEPT_MAPS = 128
"""The most shards that are kept mapped: each takes a file descriptor, and a process may have few."""
DEEPEST = 64
"""How deep the objects and lists of a JSON file may be nested: what reads and copies them calls itself."""
SHOWN = 4
"""The most files of one kind that a notice names."""
_SNAPSHOT_REPOSITORY = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source: which shard holds it, and its header entry there."""

    name: str
    file: str
    entry: TensorEntry

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape


@dataclass(frozen=True)
class Source:
    """A checkpoint whose headers have been read; its weights have not.

    label: what the user called it. repo, commit: the hub's names for it, when it came from there. config: the parsed
    config.json in its own key order, config_text its bytes. headers: shard name -> header. tensors: tensor name ->
    where it is. index_text: the index file's bytes, None for a single file. notices: what is worth saying.
    """

    label: str
    root: Path
    config: Mapping[str, Any]
    config_text: bytes = field(repr=False)
    headers: Mapping[str, Header] = field(repr=False)
    tensors: Mapping[str, SourceTensor] = field(repr=False)
    index_text: bytes | None = field(default=None, repr=False)
    side_files: tuple[SideFile, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notices: tuple[str, ...] = ()
    repo: str | None = None
    commit: str | None = None
    shards: Shards = field(default=LocalShards(Path()), repr=False)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """The tensors as codecs take them."""
        return stored_tensors(self.headers.values())

    @property
    def has_weights(self) -> bool:
        return bool(self.headers)

    @property
    def weight_bytes(self) -> int:
        return sum(header.data_bytes for header in self.headers.values())

    def with_all_files(self) -> Source:
        """This source with other weights beside the checkpoint's own (GGUF, ONNX) among its side files. Code, pickles
        and links out of the directory stay behind."""
        more = [
            SideFile(item.path, (self.root / item.path).stat().st_size)
            for item in self.skipped
            if item.why == NOT_OF_IT
        ]
        return replace(
            self,
            side_files=tuple(sorted((*self.side_files, *more), key=lambda item: item.path)),
            skipped=tuple(item for item in self.skipped if item.why != NOT_OF_IT),
        )

    @property
    def left_behind(self) -> list[str]:
        """What an import leaves behind of the directory, a line for each reason; pickles are in `notices`."""
        why: dict[str, list[str]] = {}
        for item in self.skipped:
            if not item.path.endswith(PICKLES):
                why.setdefault(item.why, []).append(item.path)
        return [
            f"left behind: {', '.join(names[:SHOWN])}"
            + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            + f" ({reason})"
            for reason, names in why.items()
        ]

    def open_shard(self, name: str, private: bool = False) -> ShardFile:
        """An opened shard (private: `MappedFile`). Raises ConversionError when it is not the file any more whose header
        was read."""
        try:
            return self.shards.open(name, self.headers[name], private)
        except ConversionError as error:
            raise within(self.label, error) from error.__cause__
        except OSError as error:
            raise ConversionError(f"{self.label}: {name} cannot be read any more ({error.strerror})") from error

    def size(self, name: str) -> int:
        """The size in bytes of a file, a shard or one beside them."""
        return self._holder(name).size(name)

    def etag(self, name: str) -> str | None:
        """The hub's etag of a file, where it is known."""
        return self._holder(name).etag(name)

    def _holder(self, name: str) -> Shards:
        return self.shards if name in self.headers else LocalShards(self.root)


class ShardMaps:
    """The maps of a source's shards by name: each opened when it is asked for, and the last few kept open. Arrays keep
    the map they lie in alive."""

    def __init__(self, source: Source, private: bool = False) -> None:
        self._source, self._private = source, private
        self._held: OrderedDict[str, ShardFile] = OrderedDict()
        self._lock = Lock()

    def __getitem__(self, shard: str) -> ShardFile:
        """The map of a shard. Any thread may ask. Raises ConversionError as `Source.open_shard` does."""
        with self._lock:
            if shard not in self._held:
                self._held[shard] = self._source.open_shard(shard, self._private)
                if len(self._held) > KEPT_MAPS:
                    self._held.popitem(last=False)
            self._held.move_to_end(shard)
            return self._held[shard]


def open_source(
    target: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    stream: bool = False,
    all_files: bool = False,
) -> Source:
    """The source that `target` names: a directory, or a hub id `org/name` at a revision.

    A path that exists is never looked up on the hub. stream: what is not weights is fetched, the weights stay on the
    hub and are read by ranges. all_files: other weights beside the checkpoint's own (GGUF, ONNX) are fetched and are
    among its side files; code, pickles and links out of the directory never are. A directory with a config.json and no
    weights opens too (`has_weights` is False). Raises ConversionError when it cannot be opened: no such directory, no
    config, only pickled weights, a fault of a header or of the index (every fault of an index at once, as
    FindingsError).
    """
    text = str(target)
    if not text:
        raise ConversionError("the source has an empty name; name a directory or a hub id (org/name)")
    path = Path(target).expanduser()
    if stream and (path.exists() or offline):
        why = "offline mode is on" if offline else "it is a local directory"
        raise ConversionError(f"{text}: cannot be streamed, {why}; go without --stream")
    if stream and all_files:
        raise ConversionError(
            f"{text}: --all-files fetches whole files and --stream stores none; go without one of them"
        )
    shards: Shards | None = None
    if path.exists():
        root, repo, commit = _local_root(path, revision)
    elif path.is_symlink():
        raise ConversionError(f"{text}: is a link to {path.readlink()}, which does not exist")
    elif is_hub_id(text):
        cache = Path(cache_dir) if cache_dir else None
        weights = None if stream else partial(_weight_names, text)
        root = snapshot(text, revision, token, cache, offline, _near(path), weights, all_files)
        repo, commit = text, root.name
        shards = RemoteShards(text, commit, token) if stream else None
    else:
        raise ConversionError(f"{text}: no such directory (a hub id looks like org/name){_near(path)}")
    try:
        source = _read(text, root, repo, commit, shards or LocalShards(root))
        return source.with_all_files() if all_files else source
    except ConversionError as error:
        raise within(text, error) from error.__cause__
    except OSError as error:
        raise ConversionError(f"{text}: cannot be read ({error})") from error


def refuse_without_weights(source: Source) -> None:
    """Raises ConversionError for a source that is a config.json alone."""
    if not source.has_weights:
        raise ConversionError(
            f"{source.label}: holds a config.json and no weights as safetensors; pickled ones are never read, "
            "load them with transformers where that is safe and save_pretrained() them"
        )


def _near(path: Path) -> str:
    """The directory beside `path` whose name is nearest to its own, as a question; nothing when none is near."""
    try:
        names = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1)
    return f". Did you mean {path.parent / close[0]}?" if close else ""


def _local_root(path: Path, revision: str | None) -> tuple[Path, str | None, str | None]:
    if not path.is_dir():
        what = "a file" if path.is_file() else "a pipe, a socket or a device"
        raise ConversionError(f"{path}: is {what}; give the directory that holds config.json and the weights")
    if (path / "snapshots").is_dir() and path.name.startswith("models--") and not (path / CONFIG).exists():
        path = _cached_snapshot(path, revision)
    elif revision is not None:
        raise ConversionError(f"{path}: is a local directory, which has no revision {revision!r}")
    real = path.resolve()
    match = _SNAPSHOT_REPOSITORY.fullmatch(real.parent.parent.name)
    if real.parent.name == "snapshots" and match:
        return path, f"{match[1]}/{match[2]}", real.name
    return path, None, None


def _cached_snapshot(repository: Path, revision: str | None) -> Path:
    """The snapshot directory of a hub cache's repository folder at a branch, tag or commit (main by default)."""
    wanted = revision or "main"
    commits = sorted(entry.name for entry in (repository / "snapshots").iterdir() if entry.is_dir())
    reference = repository / "refs" / wanted
    commit = wanted
    if is_inside(reference, [(repository / "refs").resolve()]) and reference.is_file():
        commit = reference.read_text().strip()
    elif revision is None and len(commits) == 1:
        commit = commits[0]
    if commit not in commits:
        held = ", ".join(commits) or "none"
        raise ConversionError(f"{repository}: holds no snapshot of {wanted!r}; snapshots here: {held}")
    return repository / "snapshots" / commit


def _read(label: str, root: Path, repo: str | None, commit: str | None, files: Shards) -> Source:
    roots = allowed_roots(root)
    config_path = root / CONFIG
    if not _stands(config_path):
        if (root / MANIFEST).is_file():
            raise ConversionError(
                f"{label}: is a bank directory; give a checkpoint directory (dewconv export makes one of banks)"
            )
        raise ConversionError(f"{label}: has no {CONFIG}; give a Hugging Face checkpoint directory")
    _refuse_unreadable(config_path, roots, label)
    config_text = config_path.read_bytes()
    config = read_json_object(config_text, CONFIG)
    index_text, weight_map, shards = _shards(root, label, files)
    notices: list[str] = []
    headers: dict[str, Header] = {}
    if index_text is not None:
        _refuse_missing(files, weight_map)
        headers = files.headers(shards)
        notices += _check_index(weight_map, headers)
    elif shards:
        fault = files.fault(SINGLE)
        if fault is not None:
            raise ConversionError(f"{label}: {SINGLE} is {fault}; put the file itself there")
        headers = files.headers(shards)
    else:
        _refuse_pickles(root, label)
    tensors = {
        name: SourceTensor(name, shard, entry)
        for shard, header in headers.items()
        for name, entry in header.entries.items()
    }
    side, skipped = survey(root, but=(CONFIG, INDEX, *shards) if index_text is not None else (CONFIG, *shards))
    if shards and any(item.path.endswith(PICKLES) for item in skipped):
        notices.append("the directory also holds pickled weights; the safetensors files are used, no pickle is read")
    return Source(
        label=label,
        root=root,
        config=config,
        config_text=config_text,
        headers=headers,
        tensors=tensors,
        index_text=index_text,
        side_files=side,
        skipped=skipped,
        notices=tuple(notices),
        repo=repo,
        commit=commit,
        shards=files,
    )


def read_json_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object whose keys are distinct, whose numbers are not NaN, and which is at most `DEEPEST` deep. Raises
    ConversionError naming `where`."""

    def refuse_nan(name: str) -> float:
        if name == "NaN":
            raise ConversionError(f"{where}: holds NaN, which is no value a config can have")
        return float(name)

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise ConversionError(f"{where}: names {name!r} twice; remove one")
            table[name] = value
        return table

    try:
        value = json.loads(text.decode("utf-8"), parse_constant=refuse_nan, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:  # bytes that are no text, text that is no JSON, endless numbers
        raise ConversionError(f"{where}: is not valid JSON ({str(error).partition(';')[0]})") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{where}: is not a JSON object")
    if not is_unicode(text, value):
        raise ConversionError(f"{where}: has half a surrogate pair, which is no Unicode; fetch the file again")
    pending = [(value, 1)]
    while pending:
        container, depth = pending.pop()
        if depth > DEEPEST:
            raise ConversionError(f"{where}: is nested more than {DEEPEST} deep; fetch the file again")
        below = container.values() if isinstance(container, dict) else container
        pending += [(item, depth + 1) for item in below if isinstance(item, dict | list)]
    return value


def _stands(path: Path) -> bool:
    """Whether anything is called `path`, a link to nothing included."""
    return path.is_symlink() or path.exists()


def _refuse_unreadable(path: Path, roots: Sequence[Path], label: str) -> None:
    fault = fault_of_file(path, roots)
    if fault is not None:
        raise ConversionError(f"{label}: {path.name} is {fault}; put the file itself there")


def _shards(root: Path, label: str, files: Shards) -> tuple[bytes | None, dict[str, str], tuple[str, ...]]:
    """(index text, its tensor -> shard, shard names) as the directory states them; no shard is opened here."""
    index = root / INDEX
    if not _stands(index):
        return None, {}, (SINGLE,) if files.stands(SINGLE) else ()
    _refuse_unreadable(index, allowed_roots(root), label)
    text = index.read_bytes()
    weight_map = _weight_map(text)
    shards = set(weight_map.values())
    if SINGLE not in shards and files.stands(SINGLE):
        raise ConversionError(
            f"both {SINGLE} and {INDEX}, which does not name it, are present; remove the one that is not meant"
        )
    return text, weight_map, tuple(sorted(shards))


def _weight_names(label: str, root: Path) -> list[str]:
    """The files that may hold the weights of what lies in `root`: a repository may have others beside them. An index
    that is refused is refused here, before any is fetched."""
    if not (root / INDEX).is_file():
        return [SINGLE]
    try:
        return [SINGLE, *dict.fromkeys(_weight_map((root / INDEX).read_bytes()).values())]
    except ConversionError as error:
        raise within(label, error) from error.__cause__


def _weight_map(text: bytes) -> dict[str, str]:
    """tensor -> shard. Raises FindingsError naming every entry that is not the plain name of a safetensors file."""
    weight_map = read_json_object(text, INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{INDEX}: has no weight_map object; fetch the index again")
    if not weight_map:
        raise ConversionError(f"{INDEX}: its weight_map is empty, so it names no shard; fetch the index again")
    plain = {shard for shard in {item for item in weight_map.values() if isinstance(item, str)} if _is_plain(shard)}
    escapes = [
        Finding(
            f"{INDEX} entry {name!r}", repr(shard), "a plain file name ending in .safetensors", "fetch the index again"
        )
        for name, shard in weight_map.items()
        if not isinstance(shard, str) or shard not in plain
    ]
    if escapes:
        raise FindingsError(INDEX, escapes)
    return weight_map


def _is_plain(shard: str) -> bool:
    return shard.endswith(".safetensors") and not shard.startswith(".") and re.search(r"[/\\:\x00-\x1f]", shard) is None


def _refuse_missing(files: Shards, weight_map: Mapping[str, str]) -> None:
    findings = []
    for shard in sorted(set(weight_map.values())):
        fault = files.fault(shard)
        if fault is not None:
            held = [name for name, file in weight_map.items() if file == shard]
            findings.append(
                Finding(
                    f"shard {shard}",
                    fault,
                    f"{len(held)} tensor(s) of the index, {held[0]!r} first",
                    "finish the download, or put the file itself there",
                )
            )
    if findings:
        raise FindingsError(INDEX, findings)


def _check_index(weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> list[str]:
    """What the shards hold beyond the index, as notices. Raises FindingsError for what they contradict it in."""
    findings = []
    holders: dict[str, list[str]] = {}
    for shard, header in headers.items():
        for name in header.entries:
            holders.setdefault(name, []).append(shard)
    for name, shard in weight_map.items():
        if shard not in holders.get(name, ()):
            elsewhere = ", ".join(holders.get(name, ())) or "no shard"
            findings.append(
                Finding(
                    f"tensor {name!r}",
                    f"in {elsewhere}",
                    f"in {shard}, where the index puts it",
                    "fetch the index and shards of one revision",
                )
            )
    for name, shards in holders.items():
        if len(shards) > 1:
            findings.append(
                Finding(f"tensor {name!r}", f"in {' and '.join(shards)}", "in one shard", "remove the stale shard")
            )
    if findings:
        raise FindingsError(INDEX, findings)
    unlisted = sorted(set(holders) - set(weight_map))
    return [f"tensor {name!r} is in {holders[name][0]} and not in the index" for name in unlisted]


def _refuse_pickles(root: Path, label: str) -> None:
    names = sorted(path.name for path in root.iterdir())
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise ConversionError(
            f"{label}: holds only pickled weights ({pickled[0]}), which can run code and are never read; "
            "load them with transformers where that is safe and save_pretrained() them as safetensors"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        raise ConversionError(f"{label}: has no {SINGLE} and no {INDEX}, only {', '.join(others)}")
