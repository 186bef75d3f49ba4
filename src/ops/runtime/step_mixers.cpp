// The functions of a step's mixers: each computes one kind by its kernel.
//
// A record is the arguments of the kernel, of which those that are the same in every step are set.
#include "runtime/step.h"

namespace {

// Sets what a kernel of attention is told of rows.
template <class Args>
void put_rows(const Batch& rows, int64_t group, Args* args) {
  args->rows = rows.rows(), args->tokens = rows.starts.back();
  args->query_start_loc = rows.starts.data(), args->seq_lens = rows.lengths.data();
  args->verifies = rows.verifies.data();
  args->block_tables = rows.blocks[size_t(group)].data();
}

// Sets all that a kernel of attention is told of the step, its query included.
template <class Args>
void put_step(Step& step, const Tensor& query, int64_t group, char* out, Args* args) {
  Inputs& in = step.in;
  put_rows(in.all, group, args);
  args->tokens = step.tokens();
  args->slot_mapping = in.slots[size_t(group)].data();
  args->query = query.data, args->query_stride = query.strides[0];
  args->out = out;
  args->block_table_stride = args->max_blocks = in.max_blocks;
  args->dtype = step.context.dtype, args->threads = step.context.threads;
  args->deterministic = step.context.deterministic;
}

// Writes keys and values of every token, and attends for every token, or if the step narrows for sampled
// tokens only. A query has `width` elements.
template <class Args>
int attend(Step& step, int64_t group, int64_t width, Args args, int (*kernel)(const Args*)) {
  if (!step.narrows()) return kernel(&args);
  args.rows = 0;
  if (int status = kernel(&args)) return status;
  Inputs& in = step.in;
  const int64_t samples = int64_t(in.sampled.size());
  if (samples == 0) return kOk;
  const size_t item = item_size(step.context);
  args.query = in.pick(static_cast<const char*>(args.query), size_t(args.query_stride) * item,
                       size_t(width) * item, &in.picked);
  args.query_stride = width;
  put_rows(in.last, group, &args);
  // The first call has written all keys and values.
  std::fill_n(in.slots[size_t(group)].begin(), samples, -1);
  return kernel(&args);
}

// A numeric tensor whose tokens lie side by side, as they do if there is one.
bool is_contiguous(const Tensor& x) {
  return x.dims == 2 && (x.sizes[0] < 2 || x.strides[0] == x.sizes[1]) &&
         (x.sizes[1] < 2 || x.strides[1] == 1);
}

}  // namespace

// Reads query, key and value [T, heads, head_dim]; writes [T, num_heads * head_dim].
SLIPSTREAM_EXPORT int slipstream_step_attention(const Instruction* instruction, Step* step) {
  const auto& layer = *static_cast<const AttentionLayer*>(instruction->record);
  AttentionArgs args = *layer.attention;
  const Tensor &query = step->read(*instruction, 0), &key = step->read(*instruction, 1);
  const Tensor& value = step->read(*instruction, 2);
  const int64_t width = args.num_heads * args.head_dim;
  return step->mix(*instruction, width, [&](char* out) {
    put_step(*step, query, layer.group, out, &args);
    args.key = key.data, args.key_stride = key.strides[0];
    args.value = value.data, args.value_stride = value.strides[0];
    return attend(*step, layer.group, width, args, slipstream_paged_attention);
  });
}

// Reads query [T, heads, nope + rope] and latents [T, rank + rope]; writes [T, heads * value].
SLIPSTREAM_EXPORT int slipstream_step_latent_attention(const Instruction* instruction, Step* step) {
  const auto& layer = *static_cast<const LatentLayer*>(instruction->record);
  LatentArgs args = *layer.attention;
  const Tensor &query = step->read(*instruction, 0), &latent = step->read(*instruction, 1);
  return step->mix(*instruction, args.heads * args.value, [&](char* out) {
    put_step(*step, query, layer.group, out, &args);
    args.latent = latent.data, args.latent_stride = latent.strides[0];
    const int64_t width = args.heads * (args.nope + args.rope);
    return attend(*step, layer.group, width, args, slipstream_latent_attention);
  });
}

// Reads channels [T, channels], decay and factor [T, heads] in float32; writes [T, heads * dim].
SLIPSTREAM_EXPORT int slipstream_step_recurrence(const Instruction* instruction, Step* step) {
  const auto& layer = *static_cast<const RecurrenceLayer*>(instruction->record);
  ConvolutionArgs convolution = *layer.convolution;
  RecurrenceArgs recurrence = *layer.recurrence;
  const Tensor &channels = step->read(*instruction, 0), &decay = step->read(*instruction, 1);
  const Tensor& factor = step->read(*instruction, 2);
  if (!is_contiguous(decay) || !is_contiguous(factor)) return kBadShape;
  Inputs& in = step->in;
  const StepContext& c = step->context;
  const int64_t tokens = step->tokens(), width = recurrence.heads * recurrence.dim;
  const size_t item = item_size(c);
  return step->mix(*instruction, width, [&](char* out) {
    // States depend on all tokens, so all of them are computed.
    const size_t convolved = lines(size_t(tokens * convolution.channels) * item);
    const size_t needed = convolved + (step->narrows() ? lines(size_t(tokens * width) * item) : 0);
    if (in.scratch.size() < needed) in.scratch.resize(needed);
    char* const from = in.scratch.data()->bytes;
    char* const all = step->narrows() ? from + convolved * sizeof(Line) : out;
    convolution.x = channels.data, convolution.x_stride = channels.strides[0];
    convolution.out = from;
    recurrence.query = from + size_t(layer.query) * item;
    recurrence.key = from + size_t(layer.key) * item;
    recurrence.value = from + size_t(layer.value) * item;
    recurrence.query_stride = recurrence.key_stride = recurrence.value_stride = convolution.channels;
    recurrence.decay = reinterpret_cast<const float*>(decay.data);
    recurrence.factor = reinterpret_cast<const float*>(factor.data);
    recurrence.out = all;
    convolution.slots = recurrence.slots = in.all_rows.data();
    convolution.starts = recurrence.starts = in.all.starts.data();
    convolution.rows = recurrence.rows = in.all.rows();
    convolution.tokens = recurrence.tokens = tokens;
    convolution.dtype = recurrence.dtype = c.dtype;
    convolution.threads = recurrence.threads = c.threads;
    if (int status = slipstream_convolution(&convolution)) return status;
    if (int status = slipstream_recurrence(&recurrence)) return status;
    if (step->narrows()) in.pick(all, size_t(width) * item, size_t(width) * item, &in.mixed);
    return int(kOk);
  });
}

// Reads channels [T, channels]; writes the same.
SLIPSTREAM_EXPORT int slipstream_step_short_convolution(const Instruction* instruction, Step* step) {
  ConvolutionArgs args = *static_cast<const ConvolutionArgs*>(instruction->record);
  const Tensor& channels = step->read(*instruction, 0);
  Inputs& in = step->in;
  const StepContext& c = step->context;
  const size_t row = size_t(args.channels) * item_size(c);
  return step->mix(*instruction, args.channels, [&](char* out) {
    // What is kept depends on all tokens, so all of them are computed.
    const size_t needed = step->narrows() ? lines(size_t(step->tokens()) * row) : 0;
    if (in.scratch.size() < needed) in.scratch.resize(needed);
    char* const all = step->narrows() ? in.scratch.data()->bytes : out;
    args.x = channels.data, args.x_stride = channels.strides[0];
    args.out = all;
    args.slots = in.all_rows.data(), args.starts = in.all.starts.data();
    args.rows = in.all.rows(), args.tokens = step->tokens();
    args.dtype = c.dtype, args.threads = c.threads;
    if (int status = slipstream_convolution(&args)) return status;
    if (step->narrows()) in.pick(all, row, row, &in.mixed);
    return int(kOk);
  });
}
