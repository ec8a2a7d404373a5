"""Fetching a checkpoint's files from the Hugging Face hub, and what is said when that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from ..families.errors import ConversionError
from .side_files import CODE, PICKLES

BESIDE = (
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)
IGNORE = ("onnx/*", "coreml/*", "openvino/*", ".git/*")

WeightsOf = Callable[[Path], Sequence[str]]
"""A directory of what lies beside a checkpoint's weights -> their files' names."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HUB_ID = re.compile(f"{_PART}/{_PART}")


def is_hub_id(target: str) -> bool:
    """Whether `target` is spelled like a hub id, `org/name`."""
    return _HUB_ID.fullmatch(target) is not None and not target.endswith((".safetensors", ".json"))


def snapshot(
    repo: str,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    near: str = "",
    weights: WeightsOf | None = None,
    all_files: bool = False,
) -> Path:
    """The local snapshot directory of `repo` at `revision`, downloaded when the cache lacks it.

    `repo` is also the name of no local directory; near is said with it, of one that may have been meant. weights:
    which safetensors files are fetched, from what is beside them; None leaves all where they are. all_files: fetch
    what is no checkpoint's too (GGUF, ONNX), but neither code nor pickles.
    The library's own environment is honoured (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN). Raises
    ConversionError with one line for each way this fails; the token appears in none.
    """
    from huggingface_hub import snapshot_download

    def fetched(revision: str | None, allow: list[str] | None, ignore: list[str]) -> Path:
        path = snapshot_download(
            repo,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=offline,
            allow_patterns=allow,
            ignore_patterns=ignore,
        )
        return Path(path)

    with told(repo, revision, offline, near):
        if all_files:
            return fetched(revision, None, [".git/*", *(f"*{suffix}" for suffix in (*PICKLES, *CODE))])
        root = fetched(revision, list(BESIDE), list(IGNORE))
        if weights is not None:
            fetched(root.name, [escape(name) for name in weights(root)], [])
        return root


@contextmanager
def told(repo: str, revision: str | None = None, offline: bool = False, near: str = "") -> Iterator[None]:
    """What the hub's library raises, as a ConversionError of one line."""
    from huggingface_hub import errors

    at = repo if revision is None else f"{repo} at revision {revision}"
    try:
        yield
    except errors.GatedRepoError:
        raise ConversionError(
            f"{at}: the repository is gated; accept its terms on the hub and give a token that has access (HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConversionError(f"{repo}: the hub has no revision {revision!r}") from None
    except errors.LocalEntryNotFoundError as error:
        raise ConversionError(_not_cached(at, error, offline) + near) from None
    except errors.HfHubHTTPError as error:
        raise ConversionError(said_of(at, error.response.status_code) + near) from None
    except errors.HFValidationError:
        raise ConversionError(f"{repo}: neither an existing directory nor a valid hub id") from None
    except OSError as error:
        raise ConversionError(f"{at}: the download failed ({type(error).__name__}); try again") from None


def said_of(at: str, status: int) -> str:
    """What an answer of the hub that is none means to a user."""
    if status in (401, 404):
        return (
            f"{at}: no such directory, and the hub knows no such repository, or it is private ({status}); "
            "check the spelling, or give a token that has access (HF_TOKEN)"
        )
    if status == 403:
        return f"{at}: access is forbidden (403); the token given has no access to this repository"
    return f"{at}: the hub answered with status {status}; try again later"


def _not_cached(at: str, error: Exception, offline: bool) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error.__cause__, errors.HfHubHTTPError):
        return said_of(at, error.__cause__.response.status_code)
    if isinstance(error, errors.IncompleteSnapshotError):
        return f"{at}: the cached copy is incomplete and the hub cannot be reached; go online to finish it"
    if offline or constants.HF_HUB_OFFLINE:
        return (
            f"{at}: no such directory, and as a hub id (org/name) not in the local cache, and offline mode is on; "
            "correct the path, or go online"
        )
    return (
        f"{at}: no such directory, and as a hub id (org/name) not in the local cache, and the hub cannot be reached; "
        "correct the path, or check the connection"
    )
