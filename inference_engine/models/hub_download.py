"""Download files of a model from the Hugging Face hub into its cache. Only this process uses the hub.

    python -m inference_engine.models.hub_download org/name --revision main --cache FOLDER FILE…

Files that the model does not have are skipped. With exit status 1, standard output has the error in one line.

All other processes set the libraries to offline mode, which they read once, when they are imported.
"""

from __future__ import annotations

import argparse
import glob
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from inference_engine.errors import ModelError
from inference_engine.models.hub import HubModel

logger = logging.getLogger(__name__)

_NO_ANSWER = "check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT"


def download(model: HubModel, cache: Path, files: Sequence[str]) -> None:
    """Put those of `files` that the model has, at its revision, into the hub's `cache`.

    Raises ModelError if the hub cannot be reached or does not give them, or if the disk is full.
    """
    import httpx2
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    try:
        _download(model, cache, files)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{model.name} is gated: accept its terms at {endpoint}/{model.name}, then set HF_TOKEN or run "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{endpoint} has no model {model.name}, or it is private: set HF_TOKEN or run `hf auth login` then"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model.name} has no revision {model.revision} at {endpoint}") from error
    except (errors.LocalEntryNotFoundError, httpx2.HTTPError) as error:
        raise ModelError(f"{endpoint} {_what_it_did(error)}; {_NO_ANSWER}") from error
    except OSError as error:
        said = error.strerror or str(error).partition("\n")[0]
        raise ModelError(f"{model.name} cannot be put into {cache}: {said}") from error
    except Exception as error:
        # The library raises all kinds of exceptions for malformed answers.
        logger.debug("fetching %s", model, exc_info=True)
        raise ModelError(f"{endpoint} gives no files of {model.name} that can be read; {_NO_ANSWER}") from error


def _download(model: HubModel, cache: Path, files: Sequence[str]) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    wanted = [glob.escape(name) for name in files]
    try:
        found = snapshot_download(
            model.name, revision=model.revision, cache_dir=cache, allow_patterns=wanted, dry_run=True
        )
    except DryRunError:
        found = []  # the next call uses the cached files, or raises
    needed = sum(file.file_size or 0 for file in found if file.will_download)
    parent = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise OSError(f"it needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; make room, or set HF_HUB_CACHE")
    snapshot_download(model.name, revision=model.revision, cache_dir=cache, allow_patterns=wanted)


def _what_it_did(error: BaseException) -> str:
    """What the hub did, from an error of the library or one of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        if (status := getattr(getattr(cause, "response", None), "status_code", None)) is not None:
            return f"answered {status}"
        cause = cause.__cause__
    return "cannot be reached"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--revision", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    try:
        download(HubModel(args.name, args.revision), args.cache, args.files)
    except ModelError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
