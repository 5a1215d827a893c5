"""Model files of the Hugging Face Hub, by a name:

    hf:OWNER/NAME                   the repository's Q4_K_M, or its only model
    hf:OWNER/NAME:Q8_0              its model in this format
    hf:OWNER/NAME:folder/file.gguf  this file; of a model in several files any of them
    hf:OWNER/NAME@REVISION:...      of a branch, a tag or a commit instead of main

A model that sees has a file with its eyes beside it, whose name holds "mmproj". Such a file is named in the same way,
and found by itself where the model is one of the Hub.

huggingface_hub provides the cache, the lists of files and the connection, so its variables count: HF_HOME for the
place, HF_TOKEN for who asks, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE for the cache alone. It discards an interrupted
download. So `fill_cache` puts files into its cache, and resumes an interrupted download.

A plan needs no more than the headers of a model's files, some megabytes of many gigabytes: see HeadersOf.
"""

import dataclasses
import difflib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.gguf import PART_NAME, File, Headers
from engine.images import PAD
from engine.limits import DEFAULT_EYES, DEFAULT_MODEL
from engine.request import ModelError
from kernels.card import show_bytes

PREFIX = "hf:"
NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^:]+))?(:(?P<wish>.+))?")
BARE_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(@[^:]+)?(:.+)?")
PAGE = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<repository>[\w.-]+/[\w.-]+)"
                  r"(/(tree|blob|resolve)/(?P<revision>[^/?]+)(/(?P<file>[^?]+))?)?/?(\?.*)?")    # in a browser
MODEL, EYES = "model", "mmproj file"
DEFAULT_WISHES = {MODEL: ["Q4_K_M"], EYES: ["F16", "BF16", "F32", "Q8_0"]}  # formats, the one that is taken first first
IMATRIX = re.compile(r"^imatrix|imatrix\.gguf$", re.IGNORECASE)             # of how a model was quantised
SPECIAL = {"ud", "i1", "imat", "imatrix"}       # marks of models that are quantised with more than their own weights
MOST_LISTED = 20
BEGUN = ".incomplete"       # behind the name of a file in the cache that has not come as a whole
HEADER_BYTES = 4 << 20      # of a file are read at first for its header; with a large vocabulary it has more
MOST_HEADER_BYTES = 1 << 28
MOST_BYTES = 1 << 45        # that a file may claim to have


@dataclass(frozen=True)
class HubName:
    """What `hf:...` names. wish: a format or a file; None leaves it to the repository."""

    repository: str
    revision: str | None
    wish: str | None

    @classmethod
    def of(cls, text: str) -> "HubName":
        if (match := NAME.fullmatch(text)) is None:
            raise ModelError(f"{text}: a model of the Hub is hf:OWNER/NAME, with :FORMAT or :FILE behind it")
        return cls(**match.groupdict())

    def __str__(self):
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


class HeadersOf(str):
    """A user's name for a model, where nothing is wanted but the headers of its files. What is in the cache is taken
    from there."""

    @classmethod
    def named(cls, model):
        """The same name, if it is one of the Hub; anything else, and None, as it is."""
        return cls(model) if str(model).startswith(PREFIX) else model


class NoSuchFile(ModelError):
    """A repository without any file of the kind that was looked for."""


def local_path(model: str | Path, note: Callable[[str], None], kind: str = MODEL) -> str | Path:
    """The path of the file that a user's name for a model means, or for its eyes (kind). Files of the Hub are
    downloaded unless they are in the cache; `note` is told which. Of HeadersOf there are Headers alone. Any other name
    is a path already. Raises ModelError."""
    if str(model).startswith(PREFIX):
        return download(HubName.of(str(model)), note, kind, isinstance(model, HeadersOf))
    if not os.path.exists(model) and (name := hub_name(str(model))):
        raise ModelError(f"{model}: there is no such file; the Hub's repository of this name is {name}")
    return model


@functools.lru_cache(typed=True)        # a HeadersOf equals its name, but means less
def local_eyes(mmproj: str | Path | None, model: str | Path, note: Callable[[str], None]) -> str | Path | None:
    """The path of the file with a model's eyes; None for none.

    mmproj: a user's name for it; "none"; or None, which means the file in the model's repository, if the model is one
    of the Hub and there is any, and that of the small model that comes with qengine, however its path is written.
    model: a user's name for the model. note: as for `local_path`. The answer is kept, so that a server that goes on
    with other cards needs the Hub no more. Raises ModelError.
    """
    if mmproj == "none":
        return None
    if mmproj is not None:
        return local_path(mmproj, note, EYES)
    if Path(model).resolve() == DEFAULT_MODEL:
        return DEFAULT_EYES
    if not str(model).startswith(PREFIX):
        return None
    try:
        name = dataclasses.replace(HubName.of(str(model)), wish=None)
        return download(name, note, EYES, isinstance(model, HeadersOf))
    except NoSuchFile:
        return None


def eyes_file(mmproj, opened, note):
    """The file with a model's eyes for the argument of `load`; None for none. opened: the model, which has kind,
    tokenizer and source. note: as for `local_path`. Raises ModelError."""
    sees = opened.kind == "text" and PAD in opened.tokenizer.control
    return local_eyes(mmproj, opened.source, note) if sees or mmproj else None


def hub_name(text: str) -> str | None:
    """The `hf:` name of the model that a text means: an address of the Hub, or a name without `hf:`. None: the text is
    rather a path."""
    if page := PAGE.fullmatch(text):
        revision, file = page["revision"], page["file"] or ""
        return f"{PREFIX}{page['repository']}" + (f"@{revision}" if revision not in (None, "main") else "") + (
            f":{file}" if file.endswith(".gguf") else "")
    is_path = text.endswith(".gguf") and ":" not in text
    return None if is_path or BARE_NAME.fullmatch(text) is None else PREFIX + text


def download(name: HubName, note: Callable[[str], None], kind: str, only_headers: bool = False) -> str:
    """The path of the model's file in the cache, or of the first of its files. kind: MODEL or EYES. only_headers: or
    their Headers, if they are not in the cache. Raises ModelError."""
    import huggingface_hub      # here: half a second that nothing else needs
    try:
        commit = huggingface_hub.HfApi().resolve_revision(name.repository, revision=name.revision).resolved
        sizes = sizes_of(name.repository, commit)
        files = chosen(name, sizes, kind)
        missing = [file for file in files if not in_cache(name.repository, file, commit)]
        if missing:
            n_bytes = sum(sizes[file] or 0 for file in missing)
            several = f" and {len(files) - 1} more parts" if len(files) > 1 else ""
            if only_headers:
                note(f"reading the header of {files[0]}{several} of {name}; the whole has {show_bytes(n_bytes)}")
                return fetched_headers(name.repository, files, commit)
            check_space(name, n_bytes)
            note(f"downloading {files[0]}{several} of {name}, {show_bytes(n_bytes)}")
        else:
            note(f"{kind.removesuffix(' file')} file: {files[0]} of {name}")
        return [fetched(name.repository, file, commit) for file in files][0]
    except Exception as error:
        raise explained(name, error) from None


def sizes_of(repository: str, commit: str) -> dict[str, int | None]:
    """The repository's files and their bytes; without the Hub those of its files that the cache has."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    api = huggingface_hub.HfApi()
    try:
        info = api.model_info(repository, revision=commit, files_metadata=True)
        return {file.rfilename: file.size for file in info.siblings}
    except (OfflineModeIsEnabled, transport_error()) as error:
        unreachable = error
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        unreachable = error
    try:
        folder = Path(api.snapshot_download(repository, revision=commit, local_files_only=True))
    except huggingface_hub.errors.LocalEntryNotFoundError:
        raise unreachable from None
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def transport_error() -> type:
    """What huggingface_hub raises where there is no connection."""
    import httpx2
    return httpx2.TransportError


# ---- which files -----------------------------------------------------------------------------------------------


def models_in(files, kind: str = MODEL) -> dict[str, list[str]]:
    """{a file that is a model, or the first of its files: those of them that are there, and the first that is not}, or
    the same of eyes (kind). Names come from strangers: one may claim 99,999 parts, or hold what moves a terminal's
    cursor."""
    models = {}
    for file in sorted(files):
        if not file.lower().endswith(".gguf") or kind_of(file) != kind or not file.isprintable():
            continue
        part = PART_NAME.fullmatch(file)
        if part is None:
            models[file] = [file]
        elif (first := f"{part[1]}-00001-of-{part[3]}.gguf") not in models:
            models[first] = present_parts(part, files)
    return models


def kind_of(file: str) -> str | None:
    """Whether a GGUF file is a MODEL, or EYES, by its name; None for other things."""
    name = os.path.basename(file)
    return None if IMATRIX.search(name) else EYES if "mmproj" in name.lower() else MODEL


def present_parts(part: re.Match, files) -> list[str]:
    """The parts of a model from the first on, up to the first that is not among the files. part: of PART_NAME."""
    parts = []
    for i in range(1, max(int(part[3]), 1) + 1):
        parts.append(f"{part[1]}-{i:05}-of-{part[3]}.gguf")
        if parts[-1] not in files:
            break
    return parts


def chosen(name: HubName, sizes: dict[str, int | None], kind: str = MODEL) -> list[str]:
    """The files of the model that is wished for, in the order of their numbers; kind: or of the eyes. Raises
    ModelError."""
    models, wish = models_in(sizes, kind), name.wish
    if not models:
        others = near(name.repository.split("/")[1]) if kind == MODEL else ""
        raise NoSuchFile(f"{name}: there is no GGUF {kind} in this repository{others}")
    if wish is not None and wish.lower().endswith(".gguf"):
        found = [first for first, parts in models.items() if wish in parts] or [
            first for first, parts in models.items() if wish in map(os.path.basename, parts)]
    else:
        found = in_first_format(models, DEFAULT_WISHES[kind] if wish is None else [wish])
        if wish is None and not found and len(models) == 1:
            found = list(models)
    if len(found) != 1:
        how = "put one behind a colon" if kind == MODEL else f"name one as in --mmproj {name}:FILE"
        near_ones = listed(found or nearest(wish, models), models, sizes)
        raise ModelError(f"{name}: {which(wish, found, kind)}; {how}: {near_ones}")
    if missing := [file for file in models[found[0]] if file not in sizes]:
        raise ModelError(f"{name}: the repository has {found[0]}, and lacks its part {missing[0]}")
    return models[found[0]]


def in_first_format(models: dict, formats: list[str]) -> list[str]:
    """The models in the first of these formats that there are any in."""
    for format in formats:
        if found := [first for first in models if is_in_format(first, format)]:
            return found if len(found) < 2 else [first for first in found if not is_special(first)] or found
    return []


def stem_of(file: str) -> str:
    """The name of a model's file without folders, without the number of a part and without .gguf."""
    part = PART_NAME.fullmatch(file)
    return os.path.basename(os.path.splitext(file)[0] if part is None else part[1])


def is_in_format(file: str, format: str) -> bool:
    """Whether a file's name ends with a format, or its folder has the format's name."""
    ending = re.escape(format)
    folder = os.path.basename(os.path.dirname(file))
    return bool(re.search(rf"(^|[-._]){ending}$", stem_of(file), re.IGNORECASE)) or folder.lower() == format.lower()


def is_special(file: str) -> bool:
    return bool(SPECIAL & set(re.split(r"[-._]", stem_of(file).lower())))


def nearest(wish: str | None, models: dict) -> list[str]:
    """The models whose names are like what was wished for, or else all."""
    if wish is None:
        return list(models)
    names = {}
    for first in models:        # a file is like its path, its name, or its format, which the name ends with
        names |= dict.fromkeys((first, os.path.basename(first), stem_of(first)[-len(wish):]), first)
    close = difflib.get_close_matches(wish, names, n=5)
    return sorted({names[each] for each in close}) or list(models)


def which(wish: str | None, found: list[str], kind: str) -> str:
    """Why no single model was found, or no single file with eyes (kind)."""
    formats = wish or " or ".join(DEFAULT_WISHES[kind])
    if found:
        return f"{len(found)} {kind}s are in {formats}"
    return f"no {kind} is {wish}" if wish else f"none of several {kind}s is in {formats}"


def listed(some: list[str], models: dict, sizes: dict) -> str:
    """What a user may name instead."""
    said = []
    for first in some[:MOST_LISTED]:
        n_bytes = sum(sizes.get(file) or 0 for file in models[first])
        said.append(f"{first} ({show_bytes(n_bytes)})")
    more = f" and {len(some) - MOST_LISTED} more" if len(some) > MOST_LISTED else ""
    return f"{', '.join(said)}{more}"


def near(words: str) -> str:
    """The end of a sentence: repositories that the Hub finds for some words."""
    import huggingface_hub
    words = re.sub(r"[-_.]*gguf$", "", words, flags=re.IGNORECASE)
    try:
        found = [model.id for model in huggingface_hub.HfApi().list_models(search=f"{words} GGUF", limit=5)]
    except Exception:       # it is only advice
        found = []
    return f"; near it are {', '.join(found)}" if found else ""


# ---- downloading -----------------------------------------------------------------------------------------------


def in_cache(repository: str, file: str, commit: str) -> bool:
    import huggingface_hub
    return isinstance(huggingface_hub.try_to_load_from_cache(repository, file, revision=commit), str)


def blobs_of(repository: str) -> Path:
    """Where huggingface_hub's cache has the bytes of a repository's files, each by its ETag."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "blobs")


def check_space(name: HubName, n_bytes: int):
    """Raises ModelError where the disk of the cache has no room for so many bytes, of which some may be there: what was
    left of an earlier download."""
    folder = blobs_of(name.repository)
    n_bytes -= sum(begun.stat().st_size for begun in folder.glob(f"*{BEGUN}"))
    while not folder.exists():
        folder = folder.parent
    if n_bytes > (free := shutil.disk_usage(folder).free):
        raise ModelError(f"{name}: {show_bytes(n_bytes)} are to be downloaded, and {folder} has {show_bytes(free)} "
                         "left; HF_HOME may name another place")


def fetched(repository: str, file: str, commit: str) -> str:
    """The path of a file in the cache, where it is afterwards."""
    import huggingface_hub
    from huggingface_hub import constants
    if not in_cache(repository, file, commit):
        address = huggingface_hub.hf_hub_url(repository, file, revision=commit)
        metadata = huggingface_hub.get_hf_file_metadata(address)
        is_plain = re.fullmatch(r"[\w-]+", metadata.etag or "") and metadata.size
        if is_plain and metadata.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            fill_cache(repository, file, address, metadata)
    return huggingface_hub.hf_hub_download(repository, file, revision=commit)    # finds what is there


def fill_cache(repository: str, file: str, address: str, metadata):
    """Puts a file's bytes where the cache has them. What has come of a download lies beside that; another process may
    go on with it, too. `address`: of the file on the Hub, which redirects each new connection to the bytes."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers
    blob = blobs_of(repository) / metadata.etag
    begun = blob.with_name(blob.name + BEGUN)
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"      # huggingface_hub's own
    for folder in blob.parent, lock.parent:
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():       # another process has brought it meanwhile
            return
        with open(begun, "ab") as out:
            if out.tell() > metadata.size:
                out.truncate(0)
            http_get(address, out, resume_size=out.tell(), headers=build_hf_headers(), expected_size=metadata.size,
                     displayed_filename=file)
        check_sum(file, begun, metadata.etag)
        os.replace(begun, blob)


def fetched_headers(repository: str, files: list[str], commit: str) -> Headers:
    """The headers of these files. They lie on the disk, and nowhere in its folders: the system takes them back when
    nobody has them open, however the program ends."""
    import huggingface_hub
    fetched = {}
    try:
        for file in files:
            address, name = huggingface_hub.hf_hub_url(repository, file, revision=commit), os.path.basename(file)
            fetched[name] = fetch_header(address, name, huggingface_hub.get_hf_file_metadata(address).size)
    except OSError as error:
        if error.errno is None:     # of the connection
            raise
        raise ModelError(f"headers cannot be kept in {tempfile.gettempdir()}: {error.strerror}; TMPDIR may name "
                         "another place") from None
    return Headers.of(fetched)


def fetch_header(address: str, name: str, n_bytes: int | None) -> File:
    """The header of the file at an address, which has n_bytes. Behind it is a hole, as long as the data is. Raises
    ModelError if that is no GGUF file."""
    if n_bytes is None or not 0 < n_bytes <= MOST_BYTES:
        raise ModelError(f"{name}: the Hub says that it has {n_bytes} bytes")
    begin, end = 0, min(HEADER_BYTES, n_bytes)
    with tempfile.TemporaryFile() as out:
        while True:
            out.seek(begin)
            read_range(address, begin, end, out)
            out.truncate(n_bytes)
            try:
                return File(name, out, header_bytes=end)
            except ModelError:      # the header may go on
                if end == n_bytes or end >= MOST_HEADER_BYTES:
                    raise
            begin, end = end, min(2 * end, n_bytes)


def read_range(address: str, begin: int, end: int, out):
    """Writes these bytes of the file at an address."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
    headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}"}
    with get_session().stream("GET", address, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                              follow_redirects=True) as response:
        hf_raise_for_status(response)
        skipped, left = begin if response.status_code == 200 else 0, end - begin     # 200: all of the file comes
        for piece in response.iter_bytes(1 << 16):
            kept = piece[skipped:][:left]
            skipped, left = max(skipped - len(piece), 0), left - len(kept)
            out.write(kept)
            if not left:
                return
    raise ConnectionError(f"{left} bytes are missing")


def check_sum(file: str, path: Path, etag: str):
    """Raises ModelError and removes the file where its bytes are not those that the Hub has. The Hub names large files
    by the SHA-256 of their bytes."""
    if re.fullmatch("[0-9a-f]{64}", etag) is None:
        return
    with open(path, "rb") as data:
        if hashlib.file_digest(data, "sha256").hexdigest() == etag:
            return
    path.unlink()
    raise ModelError(f"{file}: what was downloaded is not what the Hub has, and is thrown away; ask again")


# ---- errors ----------------------------------------------------------------------------------------------------


def explained(name: HubName, error: Exception) -> Exception:
    """What went wrong, in a sentence."""
    from huggingface_hub import constants, errors
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    token = "HF_TOKEN holds a token of huggingface.co/settings/tokens"
    match error:
        case ModelError():
            return error
        case errors.HFValidationError():
            said = "the Hub has no repositories of such names"
        case errors.GatedRepoError():
            said = (f"the repository is gated: accept its terms on {constants.ENDPOINT}/{name.repository}, and see "
                    f"that {token}")
        case errors.RepositoryNotFoundError():
            said = (f"the Hub has no such repository, or not for you: where it is private, see that {token}"
                    f"{near(name.repository.split('/')[1])}")
        case errors.RevisionNotFoundError():
            said = f"the repository has no revision {name.revision!r}"
        case errors.RemoteEntryNotFoundError():
            said = "the Hub lists the file, and does not have it"
        case errors.HfHubHTTPError() if status in (401, 403):
            said = f"the Hub refuses this with status {status}: see that {token}, and that it may read the repository"
        case errors.HfHubHTTPError():
            said = f"the Hub answers with status {status}"
        case errors.OfflineModeIsEnabled() | errors.RevisionResolutionError() | errors.LocalEntryNotFoundError() if (
                constants.HF_HUB_OFFLINE):
            said = f"the cache, {constants.HF_HUB_CACHE}, does not have it, and HF_HUB_OFFLINE forbids to ask the Hub"
        case errors.RevisionResolutionError() | errors.LocalEntryNotFoundError():
            said = (f"{constants.ENDPOINT} cannot be reached, and the cache, {constants.HF_HUB_CACHE}, does not have "
                    "the model")
        case OSError() if error.errno is not None:
            said = f"it cannot be kept in {constants.HF_HUB_CACHE}: {error.strerror}; HF_HOME may name another place"
        case _ if isinstance(error, transport_error() | OSError):
            first_line = str(error).partition("\n")[0]
            said = f"the download broke off ({first_line}); asked again, it goes on where it was"
        case _:
            return error
    return ModelError(f"{name}: {said}")
