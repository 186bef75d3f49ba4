"""Of checkpoints: fields of configurations, weights as they are stored, and adapters."""

from tests.mutants.mutation import mutations_of

_ABSENT = ("tests/models/test_absent_fields.py",)
_EXPERTS = ("tests/models/test_packed_experts.py",)
_GGUF = ("tests/models/gguf/test_metadata.py",)

MUTATIONS = (
    *mutations_of(
        "src/models/families/llama4.py",
        _ABSENT,
        (
            "the first of every few layers has experts, where no list says which",
            "return tuple(range(step - 1, layers, step))",
            "return tuple(range(0, layers, step))",
        ),
        (
            "the first of every few layers does not rotate, where no list says which",
            "return [(layer + 1) % interval != 0 for layer in range(layers)]",
            "return [layer % interval != 0 for layer in range(layers)]",
        ),
        (
            "layers without RoPE attend within chunks, where no list says which",
            "_KINDS[is_rotated and chunk is not None] for is_rotated",
            "_KINDS[chunk is not None] for is_rotated",
        ),
    ),
    *mutations_of(
        "src/models/families/gemma2.py",
        _ABSENT,
        ("the usual window is another one", '"sliding_window": 4096,', '"sliding_window": 2048,'),
        (
            "the usual width of a head is another one",
            '"head_dim": 256,',
            '"head_dim": 128,',
        ),
    ),
    *mutations_of(
        "src/models/weights/methods.py",
        _EXPERTS,
        (
            "the first expert's orders stand for those of all",
            "if not orders.is_meta and not (orders == orders[..., :1, :]).all():",
            "if not orders.is_meta and not (orders[0] == orders[0, :1]).all():",
        ),
        (
            "all experts have the order of the first",
            "matrix = matrix._replace(order=orders[..., 0, :].contiguous())",
            "matrix = matrix._replace(order=orders[:1, 0].expand(len(orders), -1).contiguous())",
        ),
        (
            "ups are decoded in the order of gates",
            "decoded[start:stop, order] = dense[start:stop].to(self.dtype)",
            "decoded[start:stop, orders[0].long()] = dense[start:stop].to(self.dtype)",
        ),
    ),
    *mutations_of(
        "src/ops/matrix.py",
        ("tests/ops/test_matrix.py",),
        (
            "rows of any length have kernels",
            "is_whole = inputs % INT4_RUN == 0 and (self.group or inputs)",
            "is_whole = (self.group or inputs)",
        ),
        (
            "groups of any size have kernels",
            "is_whole = inputs % INT4_RUN == 0 and (self.group or inputs) % self.traits.unit == 0",
            "is_whole = inputs % INT4_RUN == 0",
        ),
        (
            "a device's missing kernels are passed over",
            "is_known = device.type in devices and self.traits.is_known_to(device)",
            "is_known = self.traits.is_known_to(device)",
        ),
        (
            "one expert stands for all of a stack",
            "return self.map(lambda each: each[expert])",
            "return self.map(lambda each: each[0])",
        ),
        (
            "columns in an order are dequantized as they lie",
            "        if self.order is None:\n            return numbers\n",
            "        if self.encoding.scale is not None:\n            return numbers\n",
        ),
    ),
    *mutations_of(
        "src/ops/projections/linear.py",
        ("tests/ops/test_matrix.py",),
        (
            "inputs are gathered by the inverse of the order",
            "x = x.index_select(1, matrix.order)",
            "x = x.index_select(1, matrix.order.argsort())",
        ),
    ),
    *mutations_of(
        "src/models/weights/schemes/nvfp4.py",
        (
            "tests/models/test_quantized_checkpoints.py::test_every_matrix_of_nvfp4_has_its_own_factor",
        ),
        (
            "the factor of compressed-tensors multiplies",
            "scales / factor if self.names.divides else scales * factor",
            "scales * factor",
        ),
        (
            "the first number of a byte is in its high half",
            "torch.stack((numbers[codes & 15], numbers[codes >> 4]), dim=1)",
            "torch.stack((numbers[codes >> 4], numbers[codes & 15]), dim=1)",
        ),
    ),
    *mutations_of(
        "src/models/weights/schemes/columns.py",
        _EXPERTS,
        (
            "groups of experts are those of the checkpoint, which rows may cut",
            "group = inputs if size is None else math.gcd(size, inputs)",
            "group = inputs if size is None else min(size, inputs)",
        ),
    ),
    *mutations_of(
        "src/models/gguf/configuration.py",
        _GGUF,
        (
            "the widest Gemma 2 is scaled like the others",
            '{("gemma2", 46), ("gemma3", 62)}',
            '{("gemma3", 62)}',
        ),
        (
            "the widest Gemma 3 is scaled like the others",
            '{("gemma2", 46), ("gemma3", 62)}',
            '{("gemma2", 46)}',
        ),
        (
            "every Gemma is scaled by its width",
            'is_wide = (name, raw.get("num_hidden_layers")) in _WIDE_GEMMAS',
            "is_wide = True",
        ),
    ),
    *mutations_of(
        "src/models/adapters/peft_config.py",
        ("tests/models/adapters/test_reader.py",),
        (
            "with rsLoRA the rank of all modules divides",
            "(math.sqrt(rank) if self.rslora else rank)",
            "(math.sqrt(self.rank) if self.rslora else rank)",
        ),
        (
            "without rsLoRA the rank of all modules divides",
            "(math.sqrt(rank) if self.rslora else rank)",
            "(math.sqrt(rank) if self.rslora else self.rank)",
        ),
        (
            "a module's own alpha is passed over",
            "return _first(self.alphas, module, self.alpha) / (",
            "return self.alpha / (",
        ),
    ),
    *mutations_of(
        "src/ops/projections/routing.py",
        ("tests/ops/projections/test_routing.py",),
        (
            "sigmoids that are equal choose the first of the experts",
            'wanted = logits if routing.scoring == "sigmoid" and routing.groups == 1 else scores',
            "wanted = scores",
        ),
        (
            "a bias is added to logits",
            "wanted = wanted if choice_bias is None else scores + choice_bias",
            "wanted = wanted if choice_bias is None else wanted + choice_bias",
        ),
    ),
    *mutations_of(
        "src/engine/sizing/speed.py",
        ("tests/engine/sizing/test_planning.py::test_few_rows_share_some_of_their_experts",),
        (
            "rows share no experts until they take them all",
            "taken * (1 - (1 - share) ** tokens) for",
            "taken * min(1, share * tokens) for",
        ),
        (
            "every row reads all experts",
            "taken * (1 - (1 - share) ** tokens) for",
            "taken for",
        ),
    ),
)
