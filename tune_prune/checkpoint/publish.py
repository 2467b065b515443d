"""Upload a checkpoint to the Hugging Face hub, as one commit: the whole model is visible there, or nothing of it.

`huggingface_hub.upload_folder` makes several commits of a folder where hf_xet is installed; `create_commit` makes one, so that is
used. A new repository is private, and is made public last. What goes there is shown first, and holds no path of this machine.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from tune_prune.checkpoint import card, manifest
from tune_prune.checkpoint.licenses import TERMS, check_license
from tune_prune.checkpoint.manifest import MANIFEST, Manifest
from tune_prune.checkpoint.save import LICENSE_KEYS, WRITTEN
from tune_prune.core.errors import MachineError, UserError
from tune_prune.core.files import to_json
from tune_prune.core.kinds import texts_of
from tune_prune.models.unsupported import cause

_CHECK_NETWORK = "check the network, or leave the upload out"
_OF_THE_HUB = ".gitattributes"  # which it puts into each new repository


@dataclass(frozen=True)
class Upload:
    """A checkpoint and its place on the hub. `contents`: files on this machine, or bytes that differ from them, by their names in
    the repository."""

    folder: Path
    repo: str
    public: bool
    license: Mapping[str, str]
    contents: Mapping[str, Path | bytes]

    def __str__(self) -> str:
        """Say what is uploaded, a file a line."""
        sizes = {
            name: file.stat().st_size if isinstance(file, Path) else len(file) for name, file in self.contents.items()
        }
        width = max(map(len, sizes))
        lines = [f"{name:<{width}}  {card.short_bytes(size)}" for name, size in sizes.items()]
        who = "public: everybody can read it" if self.public else "private: only its owners can read it"
        licence = self.license.get("license_name", self.license.get("license", "unknown"))
        total = f"{len(sizes)} files, {card.short_bytes(sum(sizes.values()))}; licence {licence}"
        return "\n".join([f"upload       to {self.repo}, {who}", *(f"             {line}" for line in [*lines, total])])


def check(repo: str, stated: Mapping[str, str], public: bool) -> None:
    """Raise UserError where the model of a card that states that licence cannot be uploaded as `repo` ("org/name") by the account
    whose token is here; asks the hub. To be called before hours of work. Raises MachineError where the hub does not answer."""
    check_license(stated, repo, public)
    owner = repo.partition("/")[0]
    with _asking("asking the hub whether it takes an upload", _CHECK_NETWORK):
        try:
            account = HfApi().whoami()
        except LocalTokenNotFoundError as error:
            raise UserError(
                "to upload takes a token of the Hugging Face hub, and none is here; run `hf auth login`"
            ) from error
        role = account.get("auth", {}).get("accessToken", {}).get("role")
        owners = [account["name"], *(organisation["name"] for organisation in account.get("orgs", ()))]
        if role == "read":
            raise UserError(
                "the token of the Hugging Face hub that is here may only read; make one that writes at "
                f"{constants.ENDPOINT}/settings/tokens, and run `hf auth login`"
            )
        if role == "write" and owner.lower() not in map(str.lower, owners):  # a finer token need not tell all of them
            raise UserError(
                f"{owner} of {repo} is neither your account nor an organisation of yours; name it under one of: {', '.join(owners)}"
            )
        _present(repo, public)


def _present(repo: str, public: bool) -> ModelInfo | None:
    """Return what the hub has under that name already; None for a new one. Raises UserError where that must stay as it is."""
    try:
        info = HfApi().model_info(repo)
    except RepositoryNotFoundError:
        return None
    names = {file.rfilename for file in info.siblings or ()}
    if names - {_OF_THE_HUB} and MANIFEST not in names:
        raise UserError(f"{repo} is there and is no checkpoint of tune_prune, so it is not replaced; give another name")
    if not info.private and not public:
        raise UserError(f"{repo} is there and is public, so the upload would be; add --public, or give another name")
    return info


def plan(folder: Path, repo: str, public: bool = False) -> Upload:
    """Return what of the checkpoint in `folder` goes to `repo`: every file but hidden ones, the manifest without this machine's
    paths. Raises UserError for a folder that is no checkpoint, or whose files have changed, and what `check` raises."""
    about = manifest.read(folder) if folder.is_dir() else None
    if about is None:
        raise UserError(
            f"{folder} has no {MANIFEST}, so it is no checkpoint of tune_prune; name the folder that prune has written"
        )
    try:
        stated = huggingface_hub.metadata_load(folder / card.CARD) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"the card {folder / card.CARD} cannot be read ({cause(error)}); prune again, which writes it"
        ) from error
    licence = {key: stated[key] for key in LICENSE_KEYS if isinstance(stated.get(key), str)}
    check(repo, licence, public)
    if licence.get("license") in TERMS and not any(folder.glob("LICENSE*")):
        raise UserError(
            f"the base model's licence, {licence['license']}, wants its text to go with the model, and {folder} has no LICENSE; "
            "copy it there from the base model"
        )
    manifest.check_files(folder, about)
    names = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files: dict[str, Path | bytes] = {
        name.as_posix(): path for name, path in names.items() if not any(part.startswith(".") for part in name.parts)
    }
    files[MANIFEST] = to_json(without_paths(about).to_dict()).encode()
    return Upload(folder, repo, public, licence, files)


def without_paths(about: Manifest) -> Manifest:
    """Return the manifest with names in place of paths of the machine that made it: of the base model, its texts and its data. So
    `reproduce` asks for the ones that are not of the hub."""
    run, config = about.source, about.config
    if config.calibration is not None:
        config = dataclasses.replace(config, calibration=_texts(config.calibration))
    if run is not None:
        data_dir = run.data_dir and card.public(run.data_dir)
        run = dataclasses.replace(
            run, model=card.public(run.model), calibration=_texts(run.calibration), data_dir=data_dir
        )
    return dataclasses.replace(about, config=config, source=run)


def _texts(calibration: str) -> str:
    return "+".join(map(card.public, texts_of(calibration)))


def upload(planned: Upload) -> str:
    """Upload it, and return its address. Raises UserError where the hub refuses it, MachineError where the network fails: then
    no half of it is there, and the same call goes on."""
    again = ["tune-prune", "upload", str(planned.folder), planned.repo, *["--public"] * planned.public]
    api, repo = HfApi(), planned.repo
    with _asking(
        f"the upload to {repo}", f"it is one commit, so no half of it is there; `{shlex.join(again)}` goes on"
    ):
        address = api.create_repo(repo, private=True, exist_ok=True)
        present = _present(repo, planned.public)
        older = {file.rfilename for file in (present and present.siblings) or ()}
        about = manifest.read(planned.folder)
        assert about is not None
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, file) for name, file in planned.contents.items()
        ]
        # A smaller model may have fewer weight files than the one that it replaces.
        stale = [name for name in sorted(older - planned.contents.keys()) if any(fnmatch(name, one) for one in WRITTEN)]
        operations += [CommitOperationDelete(name) for name in stale]
        removed = f"{about.plan.removed_fraction:.1%}"
        api.create_commit(repo, operations, commit_message=f"{about.base.label}, pruned by {removed} with tune_prune")
        if planned.public:
            api.update_repo_settings(repo, private=False)
    return str(address)


@contextmanager
def _asking(what: str, step: str) -> Iterator[None]:
    """Turn what the hub's client and the network libraries raise, each their own kinds, into one sentence."""
    try:
        yield
    except (UserError, MachineError):
        raise
    except Exception as error:
        root = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
        if isinstance(root, OfflineModeIsEnabled):
            raise UserError(f"{what} takes the network, and HF_HUB_OFFLINE is set; unset it") from error
        if isinstance(root, HfHubHTTPError) and root.response.status_code in (400, 401, 402, 403, 404, 409, 413):
            reason = root.server_message or cause(root)
            token = "; look at your token and your rights, or run `hf auth login`" * (
                root.response.status_code in (401, 403)
            )
            raise UserError(
                f"{what} was refused ({root.response.status_code}: {reason}){token or f'; {step}'}"
            ) from error
        raise MachineError(f"{what} failed ({cause(root)}); {step}") from error
