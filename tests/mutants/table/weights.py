"""Of checkpoints: fields of configurations, weights as they are stored, and adapters."""

from tests.mutants.mutation import rewrites_of

_ABSENT = ("tests/models/test_absent_fields.py",)
_EXPERTS = ("tests/models/test_packed_experts.py",)
_GGUF = ("tests/models/gguf/test_metadata.py",)

MUTATIONS = (
    *rewrites_of(
        "src/models/families/llama4.py",
        _ABSENT,
        (
            "the first of every few layers has experts, where no list says which",
            "_expert_layers",
            "A - 1",
            "0",
        ),
        (
            "the first of every few layers does not rotate, where no list says which",
            "_rotating_layers",
            "A + 1",
            "A",
        ),
        (
            "layers without RoPE attend within chunks, where no list says which",
            "_chunked",
            "A and B is not None",
            "B is not None",
        ),
    ),
    *rewrites_of(
        "src/models/families/gemma2.py",
        _ABSENT,
        (
            "the usual window is another one",
            "DEFAULTS",
            "4096",
            "2048",
        ),
        (
            "the usual width of a head is another one",
            "DEFAULTS",
            (
                "{'num_key_value_heads': 4, 'head_dim': 256, 'hidden_activation': "
                "'gelu_pytorch_tanh', 'rms_norm_eps': 1e-06, 'query_pre_attn_scalar': 256, "
                "'sliding_window': 4096, 'tie_word_embeddings': True}"
            ),
            (
                "{'num_key_value_heads': 4, 'head_dim': 128, 'hidden_activation': "
                "'gelu_pytorch_tanh', 'rms_norm_eps': 1e-06, 'query_pre_attn_scalar': 256, "
                "'sliding_window': 4096, 'tie_word_embeddings': True}"
            ),
        ),
    ),
    *rewrites_of(
        "src/models/weights/methods.py",
        _EXPERTS,
        (
            "the first expert's orders stand for those of all",
            "Stored.make",
            "A == A[..., :1, :]",
            "A[0] == A[0, :1]",
        ),
        (
            "all experts have the order of the first",
            "Stored.make",
            "A[..., 0, :]",
            "A[:1, 0].expand(len(A), -1)",
        ),
        (
            "ups are decoded in the order of gates",
            "Stored._decoded",
            "A[B:C, D]",
            "A[B:C, orders[0].long()]",
        ),
    ),
    *rewrites_of(
        "src/ops/matrix.py",
        ("tests/ops/test_matrix.py",),
        (
            "rows of any length have kernels",
            "Encoding.has_kernel",
            "A % INT4_RUN == 0 and (self.group or A) % self.traits.unit == 0",
            "(self.group or A) % self.traits.unit == 0",
        ),
        (
            "groups of any size have kernels",
            "Encoding.has_kernel",
            "A % INT4_RUN == 0 and (self.group or A) % self.traits.unit == 0",
            "A % INT4_RUN == 0",
        ),
        (
            "a device's missing kernels are passed over",
            "Encoding.has_kernel",
            "A.type in B and self.traits.is_known_to(A)",
            "self.traits.is_known_to(A)",
        ),
        (
            "one expert stands for all of a stack",
            "Matrix.of",
            "A[B]",
            "A[0]",
        ),
        (
            "columns in an order are dequantized as they lie",
            "Matrix.dequantized",
            "self.order is None",
            "self.encoding.scale is not None",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/linear.py",
        ("tests/ops/test_matrix.py",),
        (
            "inputs are gathered by the inverse of the order",
            "linear",
            "A.index_select(1, B.order)",
            "A.index_select(1, B.order.argsort())",
        ),
    ),
    *rewrites_of(
        "src/models/weights/schemes/nvfp4.py",
        (
            "tests/models/test_quantized_checkpoints.py::test_every_matrix_of_nvfp4_has_its_own_factor",
        ),
        (
            "the factor of compressed-tensors multiplies",
            "Nvfp4Packing._scales",
            "A / B if self.names.divides else A * B",
            "A * B",
        ),
        (
            "the first number of a byte is in its high half",
            "_numbers",
            "(A[B & 15], A[B >> 4])",
            "(A[B >> 4], A[B & 15])",
        ),
    ),
    *rewrites_of(
        "src/models/weights/schemes/columns.py",
        _EXPERTS,
        (
            "groups of experts are those of the checkpoint, which rows may cut",
            "group_in",
            "math.gcd",
            "min",
        ),
    ),
    *rewrites_of(
        "src/models/gguf/configuration.py",
        _GGUF,
        (
            "the widest Gemma 2 is scaled like the others",
            "_WIDE_GEMMAS",
            "{('gemma2', 46), ('gemma3', 62)}",
            "{('gemma3', 62)}",
        ),
        (
            "the widest Gemma 3 is scaled like the others",
            "_WIDE_GEMMAS",
            "{('gemma2', 46), ('gemma3', 62)}",
            "{('gemma2', 46)}",
        ),
        (
            "every Gemma is scaled by its width",
            "_gemma",
            "(A, B.get('num_hidden_layers')) in _WIDE_GEMMAS",
            "True",
        ),
    ),
    *rewrites_of(
        "src/models/adapters/peft_config.py",
        ("tests/models/adapters/test_reader.py",),
        (
            "with rsLoRA the rank of all modules divides",
            "PeftConfig.scale_of",
            "math.sqrt(A)",
            "math.sqrt(self.rank)",
        ),
        (
            "without rsLoRA the rank of all modules divides",
            "PeftConfig.scale_of",
            "math.sqrt(A) if self.rslora else A",
            "math.sqrt(A) if self.rslora else self.rank",
        ),
        (
            "a module's own alpha is passed over",
            "PeftConfig.scale_of",
            "_first(self.alphas, A, self.alpha)",
            "self.alpha",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/routing.py",
        ("tests/ops/projections/test_routing.py",),
        (
            "sigmoids that are equal choose the first of the experts",
            "route",
            "B if A.scoring == 'sigmoid' and A.groups == 1 else C",
            "C",
        ),
        (
            "a bias is added to logits",
            "route",
            "B if A is None else C + A",
            "B if A is None else B + A",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/speed.py",
        ("tests/engine/sizing/test_planning.py::test_few_rows_share_some_of_their_experts",),
        (
            "rows share no experts until they take them all",
            "Work.bytes_of_step",
            "1 - (1 - A) ** B",
            "min(1, A * B)",
        ),
        (
            "every row reads all experts",
            "Work.bytes_of_step",
            "A * (1 - (1 - B) ** C)",
            "A",
        ),
    ),
)
