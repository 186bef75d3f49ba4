"""An op's record: torch's schema, flat arguments, shapes, and the call of the CPU's kernel."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from src.ops import LORA, OPS, lora
from src.ops.attention.spec import AttentionSpec
from src.ops.records import ANY, Record, nested, number, result, tensor
from src.ops.runtime import c_records as cpu_records
from src.ops.runtime.c_records import int64, pointer
from src.ops.runtime.packing import bind


class Scaled(Record, result=result("out", "tokens parts", like="x", dtype=torch.float64)):
    """Every kind of field."""

    x: Tensor = tensor("tokens parts*size+1", rows=True)
    table: Tensor = tensor("parts size", torch.int32)
    kept: Tensor = tensor("_ size-1 parts", ANY, rows=True, changed=True)
    weight: Tensor | None = tensor("parts")
    spec: AttentionSpec = nested()
    steps: int = number(varies=True)
    factor: float = number(default=1.5, on_cpu=False)
    is_exact: bool = number(default=False)
    plan: Tensor | None = tensor("_", on_cpu=False, default=None)


SPEC = AttentionSpec(0.5, cap=2.0, window=7, sinks=torch.ones(3))


def scaled(**changes: Any) -> Scaled:
    given = Scaled(
        x=torch.zeros(4, 20)[:, :7],
        table=torch.zeros(2, 3, dtype=torch.int32),
        kept=torch.zeros(5, 9)[:, :4].unflatten(1, (2, 2)),
        weight=None,
        spec=SPEC,
        steps=3,
    )
    return given.replace(**changes)


def test_the_schema_says_types_changes_defaults_and_results() -> None:
    assert Scaled.schema() == (
        "(Tensor x, Tensor table, Tensor(a!) kept, Tensor? weight, Tensor? sinks, "
        "float[] scalars, SymInt steps, float factor=1.5, bool is_exact=False, "
        "Tensor? plan=None) -> Tensor"
    )


def test_arguments_before_one_without_a_default_are_never_left_out() -> None:
    class Late(Record):
        """Parts of a nested value have no defaults."""

        bias: Tensor | None = tensor("_", default=None)
        spec: AttentionSpec = nested(default=SPEC)
        steps: int = number(default=1)

    assert Late.schema() == "(Tensor? bias, Tensor? sinks, float[] scalars, int steps=1) -> ()"
    assert Late(spec=SPEC).bias is None
    assert Late.of_flat(None, *SPEC.parts()).steps == 1


def test_flat_arguments_make_the_same_record() -> None:
    given = scaled(plan=torch.ones(2))
    again = Scaled.of_flat(*given.flat())
    assert again.plan is given.plan
    assert again.spec.scalars() == SPEC.scalars()
    assert again.spec.sinks is SPEC.sinks
    assert type(given.flat()) is tuple  # torch takes no other for a tuple
    assert len(given.flat()) == len(Scaled.flat_parameters()) == len(given) + 1
    # torch leaves out trailing defaults.
    assert Scaled.of_flat(*given.flat()[:7]).factor == 1.5


def test_functions_of_records_and_of_flat_arguments_are_told_the_same() -> None:
    given = scaled()
    assert Scaled.taking_flat(lambda call: call)(*given.flat()).steps == 3
    told = Scaled.passing(lambda *flat: flat)(**dict(zip(Scaled.fields, given, strict=True)))
    pairs = zip(told, given.flat(), strict=True)
    assert all(each is other or each == other for each, other in pairs)
    assert told[4] is SPEC.sinks


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="step"):
        scaled(step=1)
    with pytest.raises(TypeError, match="steps"):
        Scaled(x=torch.ones(1))  # type: ignore[call-arg]


def test_a_result_that_is_traced_has_sizes_of_named_dimensions() -> None:
    made = scaled().traced()
    assert made is not None
    assert (made.shape, made.dtype) == ((4, 2), torch.float64)


def test_a_size_is_never_that_of_a_tensor_that_may_be_absent() -> None:
    assert Scaled.place_of("parts") == ("table", 0)

    class Biased(Record, result=result("out", "width", like="x")):
        """The first tensor with the dimension is optional."""

        bias: Tensor | None = tensor("width")
        x: Tensor = tensor("tokens width")

    made = Biased(None, torch.ones(2, 3)).traced()
    assert made is not None
    assert made.shape == (3,)


# Compiled code that is kept calls ops by these.
SCHEMAS = [
    "streamed_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? offsets, int kind, "
    "Tensor? bias=None) -> Tensor",
    "lora(Tensor base, Tensor x, Tensor down, Tensor up, Tensor ranks, Tensor starts, "
    "Tensor slots) -> Tensor",
    "causal_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor slots, "
    "Tensor query_start_loc, Tensor(b!) out, bool silu=True) -> ()",
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_torch_and_traced_graphs_see_these_arguments(schema: str) -> None:
    (op,) = (op for op in OPS if schema.startswith(f"{op.name}("))
    assert str(op.overload._schema) == f"slipstream::{schema}"


def test_dimensions_are_expressions() -> None:
    for wrong in ("rows + 1", "rows+", "2x"):
        with pytest.raises(ValueError, match="is no dimension: write expressions without spaces"):
            tensor(wrong)


@cpu_records.record(call=Scaled, names={"state_stride": "kept_stride", "exact": "is_exact"})
class ScaledArgs(cpu_records.Record):
    """What a kernel of `Scaled` would be given."""

    spec: int = pointer("const void*")
    doubled: int = int64()


cpu_records._records.remove(ScaledArgs)


class Pair(ctypes.Structure):
    """What `computed` hands over by its address."""

    _fields_ = (("first", ctypes.c_int64),)


def bound(kernel: Callable[[Any], int], **others: Any) -> Callable[..., Any]:
    return bind(
        lambda struct: kernel(struct),
        ScaledArgs,
        computed={
            "spec": lambda scalars: Pair(int(scalars[2])),
            "doubled": lambda steps: 2 * steps,
        },
        **others,
    )


def test_a_kernel_is_given_addresses_sizes_and_numbers() -> None:
    seen: list[dict[str, Any]] = []

    def kernel(args: Any) -> int:
        seen.append({name: getattr(args, name) for name in ScaledArgs.declared})
        seen[-1]["first"] = Pair.from_address(args.spec).first
        return 0

    given = scaled(is_exact=True)
    out = bound(kernel)(*given.flat()[:-1])
    assert (out.shape, out.dtype) == ((4, 2), torch.float64)
    got = seen[0]
    assert got["x"] == given.x.data_ptr()
    assert got["kept"] == given.kept.data_ptr()
    assert got["out"] == out.data_ptr()
    assert not got["weight"]
    numbers = ("x_stride", "state_stride", "tokens", "parts", "size", "dtype", "steps", "exact")
    assert [got[name] for name in numbers] == [20, 9, 4, 2, 3, 0, 3, 1]
    assert (got["doubled"], got["first"]) == (6, 7)
    weight = torch.ones(2)
    bound(kernel)(*scaled(weight=weight).flat())
    assert seen[1]["weight"] == weight.data_ptr()


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(4, 8)},
        {"x": torch.zeros(7, 4).T},
        {"x": torch.zeros(4, 7, dtype=torch.float64)},
        {"x": torch.zeros(28)},
        {"table": torch.zeros(2, 3)},
        {"table": torch.zeros(3, 2, dtype=torch.int32).T},
        {"table": torch.zeros(2, 4, dtype=torch.int32)},
        {"kept": torch.zeros(5, 3, 2)},
        {"kept": torch.zeros(5, 2, 2, 1)},
        {"kept": torch.zeros(5, 2, 2).transpose(1, 2)},
        {"weight": torch.zeros(3)},
        {"weight": torch.zeros(2, dtype=torch.bfloat16)},
        {"weight": torch.zeros(4)[::2]},
    ],
)
def test_tensors_that_are_not_as_said_are_refused(changes: dict[str, Tensor]) -> None:
    call = bound(lambda _: pytest.fail("called"))
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"{name} \[.*got .*{name} \("):
        call(*scaled(**changes).flat())


def test_strides_of_dimensions_of_size_one_mean_nothing() -> None:
    call = bound(lambda _: 0)
    kept = torch.zeros(10).as_strided((5, 2, 1), (2, 1, 9))
    table = torch.zeros(1, 3, dtype=torch.int32)
    call(*scaled(x=torch.zeros(2, 4), kept=kept, table=table).flat())


def test_what_a_check_and_a_status_say_is_raised() -> None:
    def check(steps: int, plan: Tensor | None) -> None:
        if steps == 4:
            raise ValueError("four")

    with pytest.raises(ValueError, match="four"):
        bound(lambda _: 0, check=check)(*scaled(steps=4).flat())
    with pytest.raises(ValueError, match=r"got x \(28,\)"):
        bound(lambda _: 0, check=check)(*scaled(x=torch.zeros(28), steps=4).flat())
    with pytest.raises(ValueError, match="slot_mapping"):
        bound(lambda _: 1, check=check)(*scaled().flat())


def test_a_struct_with_a_field_of_nothing_is_refused() -> None:
    with pytest.raises(LookupError, match=r"ScaledArgs\.spec is nothing of Scaled"):
        bind(lambda _: 0, ScaledArgs)


@pytest.mark.parametrize("name", ["steps", "main", "threads"])
def test_a_dimension_with_the_name_of_something_else_is_refused(name: str) -> None:
    class Named(Record):
        """Its dimension would be what the kernel is given in place of a number."""

        x: Tensor = tensor(f"tokens {name}")
        steps: int = number()

    @cpu_records.record(call=Named)
    class NamedArgs(cpu_records.Record):
        """Its struct."""

    cpu_records._records.remove(NamedArgs)
    with pytest.raises(LookupError, match=f"Named cannot have a dimension '{name}'"):
        bind(lambda _: 0, NamedArgs)


def test_sizes_follow_from_sums_and_differences() -> None:
    class Bounded(Record):
        """Bounds of rows, and the taps behind the first."""

        starts: Tensor = tensor("rows+1", torch.int32)
        states: Tensor = tensor("taps-1")

    @cpu_records.record(call=Bounded)
    class BoundedArgs(cpu_records.Record):
        """Its struct."""

    cpu_records._records.remove(BoundedArgs)
    seen: list[tuple[int, int]] = []

    def kernel(struct: Any) -> int:
        seen.append((struct.rows, struct.taps))
        return 0

    bind(kernel, BoundedArgs)(torch.zeros(4, dtype=torch.int32), torch.zeros(2))
    assert seen == [(3, 3)]


def test_a_struct_has_addresses_of_the_tensors_types() -> None:
    declared = {name: field.declared for name, field in ScaledArgs.declared.items()}
    assert (declared["x"], declared["kept"]) == ("const void*", "void*")
    assert (declared["table"], declared["out"]) == ("const int32_t*", "void*")
    with pytest.raises(LookupError, match=r"Scaled has no \['nothing'\]"):
        cpu_records.record(call=Scaled, names={"something": "nothing"})(
            type("OtherArgs", (cpu_records.Record,), {})
        )


def test_a_size_that_no_whole_number_gives_is_refused() -> None:
    class Cut(Record):
        """Rows of parts."""

        x: Tensor = tensor("tokens 4*parts")

    @cpu_records.record(call=Cut)
    class CutArgs(cpu_records.Record):
        """Its struct."""

    cpu_records._records.remove(CutArgs)
    seen: list[int] = []

    def kernel(struct: Any) -> int:
        seen.append(struct.parts)
        return 0

    call = bind(kernel, CutArgs)
    call(torch.zeros(1, 12))
    assert seen == [3]
    with pytest.raises(ValueError, match=r"x \[tokens, 4\*parts\].* got x \(1, 14\)"):
        call(torch.zeros(1, 14))


@pytest.mark.parametrize(
    ("dim", "length", "size"),
    [
        ("size+1", 7, 6),
        ("1+size", 7, 6),
        ("size-2", 7, 9),
        ("9-size", 7, 2),
        ("2*size+1", 7, 3),
        ("size*3-2", 7, 3),
        ("tokens+size", 7, 5),
        ("size-tokens", 7, 9),
    ],
)
def test_a_size_follows_from_what_is_computed_of_it(dim: str, length: int, size: int) -> None:
    class Bound(Record):
        """Each token has some; `size` stands nowhere alone."""

        x: Tensor = tensor("tokens")
        bounds: Tensor = tensor(dim)

    @cpu_records.record(call=Bound)
    class BoundArgs(cpu_records.Record):
        """Its struct."""

    cpu_records._records.remove(BoundArgs)
    seen: list[tuple[int, int]] = []

    def kernel(struct: Any) -> int:
        seen.append((struct.tokens, struct.size))
        return 0

    bind(kernel, BoundArgs)(torch.zeros(2), torch.zeros(length))
    assert seen == [(2, size)]


def test_a_graph_that_is_traced_has_the_op_itself() -> None:
    class Layer(torch.nn.Module):
        def forward(self, base: Tensor, *given: Tensor) -> Tensor:
            return lora(base * 2, *given)

    args = LORA.build("cpu", slots=[0], inputs=8, parts=[8], ranks=[[1], [2]], room=2)
    expected = lora(args[0] * 2, *args[1:])
    assert torch.equal(torch.compile(Layer(), fullgraph=True, backend="eager")(*args), expected)
    for strict in (False, True):
        graph = torch.export.export(Layer(), args, strict=strict).graph
        called = [node.target for node in graph.nodes if node.op == "call_function"]
        assert called == [torch.ops.aten.mul.Tensor, LORA.overload]
