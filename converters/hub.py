"""Fetching a checkpoint's files from the Hugging Face hub, and what is said when that fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..families.errors import ConversionError

ALLOW = (
    "*.safetensors",
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
IGNORE = ("*/*.safetensors", "onnx/*", "coreml/*", "openvino/*", ".git/*")

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
    weights: bool = True,
) -> Path:
    """The local snapshot directory of `repo` at `revision`, downloaded when the cache lacks it.

    `repo` is also the name of no local directory; near is said with it, of one that may have been meant. weights:
    False leaves the safetensors files where they are.
    The library's own environment is honoured (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN). Raises
    ConversionError with one line for each way this fails; the token appears in none.
    """
    from huggingface_hub import snapshot_download

    with told(repo, revision, offline, near):
        path = snapshot_download(
            repo,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=offline,
            allow_patterns=list(ALLOW),
            ignore_patterns=list(IGNORE) if weights else [*IGNORE, "*.safetensors"],
        )
    return Path(path)


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
