"""The headers of a model's weights, from files, or from the Hub without downloading the weights."""

from __future__ import annotations

from pathlib import Path

from kvhub.errors import Corrupt, KvhubError, NotFound
from kvhub.model.fingerprint import hub_snapshot, weight_files, weight_headers
from kvhub.model.headers import TensorHeader
from kvhub.model.resolve import explained


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Every tensor of the model in `path` by name.

    For a Hub snapshot without (all of) its weights the headers are fetched, some kilobytes a file; their
    offsets are within each file's data. Errors: those of `weight_headers` and of the Hub.
    """
    snapshot = hub_snapshot(path)
    try:
        files = weight_files(path)
    except NotFound:
        if snapshot is None:
            raise
        return _fetched(*snapshot)
    return weight_headers(files)


def _fetched(repository: str, commit: str) -> dict[str, TensorHeader]:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    from kvhub.hub import bounds

    bounds.install()
    try:
        found = get_safetensors_metadata(repository, revision=commit)
    except KvhubError:  # of what bounds the client
        raise
    except NotASafetensorsRepoError:
        raise NotFound(f"{repository} has no safetensors weights") from None
    except SafetensorsParsingError:
        raise Corrupt(f"{repository}: a safetensors header cannot be read") from None
    except Exception as error:
        raise explained(error, repository, commit) from error
    return {
        name: TensorHeader(tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
