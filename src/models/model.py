"""A loaded model: its program, its parameters, and the weights of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from src.core.errors import ModelLoadError
from src.distributed import Group
from src.models.adapters.memory import AdapterMemory, AdapterRoom
from src.models.adapters.targets import in_halves
from src.models.builder import ProgramBuilder
from src.models.config import ClassifierConfig, ModelConfig
from src.models.generation import GenerationDefaults
from src.models.layer_kv import CacheScales, LayerKVSpec, kv_of
from src.models.program import (
    ADAPTER_SLOTS,
    HIDDEN,
    INPUT_IDS,
    POSITIONS,
    Call,
    Function,
    Mix,
    Mixer,
    Program,
    StepInput,
    run_chain,
    run_head,
    run_program,
)
from src.models.weights.methods import ByKind, Formats, Stored
from src.models.weights.parameters import (
    Kind,
    Method,
    Parameter,
    Value,
    allocate,
    allocate_unset,
)
from src.ops.host_memory import LargePages
from src.ops.matrix import Matrix, Tiling, fits_strips, to_strips
from src.ops.projections.projection import Projection

__all__ = ["HIDDEN", "INPUT_IDS", "POSITIONS", "Model", "ModelOptions", "ModelSpec"]

WriteProgram = Callable[[ProgramBuilder, ModelConfig], None]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape, numerics and placement of a loaded model.

    Attributes
    ----------
    max_positions
        Rows of the RoPE table: the longest possible sequence, in tokens.
    uncounted_id
        The token that has no position of its own, since an encoder's positions are counted without
        it: its padding token. None: there is none.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    uncounted_id: int | None = None


def _uncounted_id(config: ModelConfig) -> int | None:
    """Positions that begin behind 0 begin behind the padding token's id, which is not counted."""
    first = 0 if config.encoder is None else config.encoder.first_position
    return first - 1 if first else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Everything that a model is built of beside its configuration.

    Attributes
    ----------
    device
        Of its parameters; `meta` for an outline.
    max_positions
        See `ModelSpec`.
    group
        The ranks that hold it.
    deterministic
        Whether a token's result must be the same bits in every batch.
    formats
        What chooses how parameters are held.
    rotates_in_op
        See `ProgramBuilder`; None: if the device is CUDA.
    outlines_tables
        Whether tables are computed on the device itself. On the meta device that takes no memory,
        but imports torch's compiler.
    adapters
        Slots for adapters; None: it takes none.
    served_on
        The device whose kernels multiply, for an outline; None: ``device``.
    taps
        See `ProgramBuilder`. Hidden states have the tapped tensors behind them then.
    """

    dtype: torch.dtype
    device: torch.device
    max_positions: int
    group: Group = field(default_factory=Group)
    deterministic: bool = False
    formats: Formats = field(default_factory=ByKind)
    rotates_in_op: bool | None = None
    outlines_tables: bool = False
    adapters: AdapterRoom | None = None
    served_on: torch.device | None = None
    taps: tuple[int, ...] = ()


class Variant(NamedTuple):
    """A program, per call of it the weights of its functions, and its index among the variants."""

    program: Program
    bound: list[Any]
    number: int = 0


class Model:
    """A program with preallocated, fused parameters, which are not filled yet.

    `before_allocating` is called when the table of parameters is complete, before any of them takes
    memory.

    Attributes
    ----------
    config
        The checkpoint's configuration.
    options
        What it is built of beside that.
    group
        The ranks that hold it.
    spec
        Shape, numerics and placement.
    formats
        What chooses how parameters are held.
    methods
        Parameter -> what makes its value; others are plain tensors.
    aliases
        Parameter -> the parameter whose values it shares.
    program
        The calls and mixers to compute.
    table
        Every parameter by name. A tied head is not in it, unless it has another format.
    weights
        Values of parameters and computed tables, by name.
    kv_scales
        Layer -> the checkpoint's scales of 8-bit keys and values, where it has some.
    pages
        Where weights on the host lie that are smaller than a large page.
    adapters
        Slots for adapters; None: it takes none.
    mixer_weights
        Per mixer, its weights.
    cache_dtype
        See `served.ServedModel`.
    """

    def __init__(
        self,
        config: ModelConfig,
        write: WriteProgram,
        options: ModelOptions,
        before_allocating: Callable[[Model], None] = lambda model: None,
    ) -> None:
        dtype, device, adapters = options.dtype, options.device, options.adapters
        rotates = options.rotates_in_op
        builder = ProgramBuilder(
            dtype=dtype,
            device=device,
            max_positions=options.max_positions,
            group=options.group,
            deterministic=options.deterministic,
            rotates_in_op=device.type == "cuda" if rotates is None else rotates,
            taps=options.taps,
        )
        write(builder, config)
        self.config, self.options = config, options
        self.group = builder.group
        self.spec = ModelSpec(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_positions=options.max_positions,
            dtype=dtype,
            device=device,
            uncounted_id=_uncounted_id(config),
        )
        self.formats = options.formats
        self.program: Program = builder.program()
        if self.program.head.inputs[0].shape != ((1 + len(options.taps)) * config.hidden_size,):
            raise ModelLoadError(f"{config.architecture}: its layers' inputs cannot be tapped")
        self.methods: dict[str, Method] = {}
        self.kv_scales: dict[int, CacheScales] = {}
        self.table: dict[str, Parameter] = {
            name: self._held(parameter) for name, parameter in builder.parameters.items()
        }
        self.aliases: dict[str, str] = builder.aliases
        self._buffers = tuple(builder.buffers)
        for name, of in builder.aliases.items():
            shape, own_dtype = self.table[of].shape, self.table[of].dtype
            head = self._held(Parameter(name, shape, "head", (), None, own_dtype))
            if name in self.methods:
                # It has a format of its own, so it is a separate parameter with equal values.
                self.table[name] = head
        before_allocating(self)
        self.pages = LargePages()
        self.weights: dict[str, Value] = {
            name: _on(device, make) if options.outlines_tables else make().to(device)
            for name, make in builder.buffers.items()
        }
        for parameter in self.table.values():
            self.weights[parameter.name] = self._room_for(parameter)
        for name, of in builder.aliases.items():
            self.weights.setdefault(name, self.weights[of])
        self.adapters: AdapterMemory | None = None
        self._variants = [Variant(self.program, [])]
        if adapters is not None:
            # As a checkpoint that is not quantized has them: adapters name its modules.
            published = builder.parameters
            if config.in_pairs:
                published = {name: in_halves(each) for name, each in published.items()}
            self.adapters = AdapterMemory(adapters, published, dtype, device)
            self.weights |= self.adapters.tensors
            adapted = builder.program(self.adapters.targets.parts)
            self._variants.append(Variant(adapted, [], 1))
        self.mixer_weights = [self._resolve(mixer.weights) for mixer in self.program.mixers]
        self._users: dict[str, list[tuple[list[Any], int, Any]]] = {}
        for variant in self._variants:
            variant.bound.extend(self._resolve(call.weights) for call in variant.program.calls)
            for call in variant.program.calls:
                self._add_user(variant.bound, call.slot, call.weights)
        for mixer in self.program.mixers:
            self._add_user(self.mixer_weights, mixer.layer, mixer.weights)

    implementation: Literal["native", "transformers"] = "native"
    is_program = True
    cache_dtype: torch.dtype | None = None

    @property
    def bound(self) -> list[Any]:
        """Per call of the program, the weights of its functions."""
        return self._variants[0].bound

    @property
    def variants(self) -> Sequence[Variant]:
        """The program, and perhaps the one with adapters."""
        return self._variants

    @property
    def adapted(self) -> Variant | None:
        """The program with adapters; its mixers and head are the program's own."""
        return self._variants[1] if len(self._variants) > 1 else None

    @property
    def generation(self) -> GenerationDefaults:
        """The sampling defaults that the checkpoint ships."""
        return self.config.generation

    @property
    def classifier(self) -> ClassifierConfig | None:
        """The head that gives scores of labels, if it has one."""
        return self.config.classifier

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """All mixers, by their layer."""
        return self.program.mixers

    @property
    def own_inputs(self) -> tuple[StepInput, ...]:
        """The step inputs that its family declared."""
        return self.program.own_inputs

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions that run the program's calls uncompiled."""
        return (run_chain,) * len(self.program.calls)

    def replace(self, name: str, weight: Value) -> None:
        """Replace a parameter's weight. Not while a call runs.

        A mixer's weights must be replaced before the engine builds its mixers, which keep them.
        """
        self.weights[name] = weight
        for bound, index, weights in self._users[name]:
            bound[index] = self._resolve(weights)

    def _add_user(self, bound: list[Any], index: int, weights: Any) -> None:
        """Note that ``bound[index]`` has the weights of these names."""
        for name in _names(weights):
            self._users.setdefault(name, []).append((bound, index, weights))

    def lay_out(
        self,
        lay_out: Callable[[Tensor], Tensor] = to_strips,
        *,
        includes_head: bool = True,
    ) -> Iterator[None]:
        """Lay out the projections' bfloat16 weights in strips.

        Each step of the iterator lays out one matrix; between steps the model can be used. Weights
        in another format, and weights that cannot be cut into strips, stay as they are. So does an
        embedding that is also the head.

        Parameters
        ----------
        lay_out
            `ops.matrix.to_strips`, or `KernelLibrary.lay_out`, which works in place.
        includes_head
            Whether to lay out the head too.
        """
        for name, parameter in self.table.items():
            if parameter.kind == "matrix" or (parameter.kind == "head" and includes_head):
                weight = self.weights[name]
                if isinstance(weight, Tensor) and fits_strips(weight):
                    tiles = Matrix.plain(lay_out(weight), Tiling.TILES)
                    self.replace(name, Projection(tiles))
                yield

    def forward(
        self,
        functions: Sequence[Function],
        input_ids: Tensor,
        positions: Tensor,
        mix: Mix,
        kept: Tensor | None = None,
        adapter_slots: Tensor | None = None,
        own_inputs: Mapping[str, Tensor] = MappingProxyType({}),
        outputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, H] or [K, H] in the model's dtype.

        Parameters
        ----------
        functions
            The model's own, or compiled replacements; with adapter slots those of the program with
            adapters.
        input_ids
            int64 [T], below `vocab_size`.
        positions
            int64 [T], each token's index in its own sequence, below `max_positions`.
        mix
            Computes a mixer, see `program.run_program`.
        kept
            int64 [K], indices of the tokens whose hidden states are wanted. None: all.
        adapter_slots
            int64 [T], the slot of each token's adapter, -1 for none. None: no token has one, and
            nothing is computed for adapters.
        own_inputs
            [T, ...], the program's own inputs by name.
        outputs
            Gets the program's outputs, see `program.run_program`.
        """
        given = {INPUT_IDS: input_ids, POSITIONS: positions, **own_inputs}
        variant = self._variants[0]
        if adapter_slots is not None:
            assert self.adapted is not None, "it has no slots"
            variant = self.adapted
            given[ADAPTER_SLOTS] = adapter_slots
        return run_program(variant.program, functions, variant.bound, given, mix, kept, outputs)

    def logits(self, functions: Sequence[Function], hidden: Tensor) -> Tensor:
        """Vocabulary scores, float32 [S, V], of selected rows of hidden states [S, H]."""
        return run_head(self.program, functions, self.bound, hidden)

    def call_arguments(
        self, call: Call, num_tokens: int, variant: Variant | None = None
    ) -> tuple[Any, ...]:
        """Arguments of a call of a variant, by default of `program`; its device may be meta.

        Integers (token ids, positions, slots) are 0, because they must be valid; other inputs are
        uninitialized.
        """
        bound = self.bound if variant is None else variant.bound
        device = self.spec.device
        tensors = [
            torch.zeros((num_tokens, *tensor.shape), dtype=tensor.dtype, device=device)
            if not tensor.dtype.is_floating_point
            else allocate((num_tokens, *tensor.shape), tensor.dtype, device)
            for tensor in call.inputs
        ]
        return (call.chain, bound[call.slot], *tensors)

    def kv_cache_spec(self) -> tuple[LayerKVSpec, ...]:
        """What each layer keeps of a sequence, in layer order; the engine plans memory by it."""
        return kv_of(self.mixers, self.cache_dtype)

    def parameters(self) -> dict[str, Tensor]:
        """Every distinct tensor of the parameters by name; a tied head is not repeated.

        The tensors of a matrix with an encoding of its own are named ``<parameter>.<field>``.
        """
        tensors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            if name not in self.table:
                continue
            if isinstance(weight, Tensor):
                tensors[name] = weight
            else:
                tensors |= {f"{name}.{part}": own for part, own in weight.tensors().items()}
        return tensors

    def names_of(self, kind: Kind) -> list[str]:
        """Names of the parameters of a kind."""
        return [name for name, parameter in self.table.items() if parameter.kind == kind]

    def buffers(self) -> dict[str, Tensor]:
        """The tables that were computed for the model, by name."""
        named = {name: self.weights[name] for name in self._buffers}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def _held(self, parameter: Parameter) -> Parameter:
        """The parameter as the formats hold it; its method, if it has one, is put down."""
        try:
            held = self.formats.hold(parameter, self.group.size)
        except ValueError as error:
            raise ModelLoadError(f"{self.formats.name}: {parameter.name}: {error}") from None
        method = held.method
        if isinstance(method, Stored) and not method.encoding.has_kernel(
            held.shape[-1],
            self.options.served_on or self.options.device,
            is_stack=len(held.shape) == 3,
        ):
            # Decoded once, and not in every call.
            return replace(held, method=None)
        if method is not None:
            self.methods[parameter.name] = method
        return held

    def _room_for(self, parameter: Parameter) -> Value:
        method, device = self.methods.get(parameter.name), self.spec.device
        if method is None and device.type == "cpu":
            return self.pages.zeros(parameter.shape, parameter.dtype)
        if method is None:
            return allocate(parameter.shape, parameter.dtype, device)
        meta = torch.device("meta")
        try:
            outline = method.make(method.staging(parameter.shape, parameter.dtype, meta))
        except ValueError as error:
            raise ModelLoadError(f"{method.name}: {parameter.name}: {error}") from None

        def room(part: Tensor) -> Tensor:
            return allocate_unset(part.shape, part.dtype, device)

        return room(outline) if isinstance(outline, Tensor) else outline.map(room)

    def _resolve(self, weights: Any) -> Any:
        """Replace names by weights in nested tuples of names (or None)."""
        if isinstance(weights, str):
            return self.weights[weights]
        if not isinstance(weights, tuple):
            return weights
        items = [self._resolve(item) for item in weights]
        return type(weights)(*items) if hasattr(weights, "_fields") else tuple(items)


def _on(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    with device:
        return make()


def _names(weights: Any) -> Iterator[str]:
    if isinstance(weights, str):
        yield weights
    elif isinstance(weights, tuple):
        for item in weights:
            yield from _names(item)
