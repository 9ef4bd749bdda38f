#pragma once
// A model as every part of zeroplan sees it: blocks of tensors and the small dataflow graph of each block.
// Backward, recompute and memory are all derived from these graphs (models/lower), so a family only says what its
// forward is made of. Sizes are per token, so that one graph serves every batch and sequence length.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/assumption.h"
#include "models/units.h"

namespace zeroplan {

enum class TensorKind : std::uint8_t { embedding, position, layer, router, expert, final, head };
std::string_view to_string(TensorKind kind);

/// One parameter tensor of a block, or `copies` equal ones (experts).
struct TensorSpec {
  std::string name;  // "model.layers.{layer}.self_attn.q_proj.weight", "...experts.{copy}.up_proj.weight"
  std::vector<std::int64_t> shape;  // [out, in] for linears
  std::int64_t copies = 1;
  TensorKind kind = TensorKind::layer;
  bool tied = false;  // shares the storage of the input embedding; counted and stored there
  bool trainable = true;

  std::int64_t elements() const;  // of all copies
};

/// Element type of an activation. `activation` is the plan's compute type (2 bytes in bf16 and fp16).
enum class ValueType : std::uint8_t { activation, fp32, byte };

/// An activation of a block: `per_token` elements for each token of the micro-batch.
struct Value {
  std::string name;  // "norm 1 output"
  std::int64_t per_token = 0;
  ValueType type = ValueType::activation;
};

enum class Kernel : std::uint8_t {
  embedding,  // table look-up (and position rows); inputs: none
  norm,    // RMSNorm or LayerNorm, one pass; outputs: normalised, statistics (fp32: 1 a token for RMS, 2 for LayerNorm)
  linear,  // y = x W^T (+ b)
  rotary,  // in place on the packed q, k, v
  attention,   // fused (flash): inputs q, k, v as packed by the family; outputs: out, log-sum-exp (fp32, heads a token)
  activation,  // GELU/SiLU/ReLU, gated or not: input width `in_features`, output width `out_features`
  add,         // residual sum of its inputs
  router,      // softmax / sigmoid + top-k over the experts: outputs weights and indices
  permute,     // gathers tokens to their experts: rows_per_token copies of each
  grouped_linear,  // one linear for each of `groups` experts, rows spread evenly
  combine,         // weighted sum of the experts' outputs back to one row a token
};
std::string_view to_string(Kernel kernel);

/// Shape of an attention op. FLOPs forward, full count: 2 s (qk_dim + v_dim) heads a token (transformer-math 2.1).
struct AttentionShape {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t qk_dim = 0;
  std::int64_t v_dim = 0;
  bool causal = true;
  std::int64_t window = 0;  // 0: none; else keys a query sees at most (sliding window or chunk)
  bool chunked = false;     // the window is a fixed chunk (Llama 4), not one that slides
  bool cross = false;       // keys and values come from the encoder output
};

/// One op of a block's forward. Ops stand in execution order. Indices are into BlockKind::values and ::tensors.
struct GraphOp {
  Kernel kernel = Kernel::linear;
  std::string name;                 // "qkv", "norm 1", "attention"
  std::vector<int> inputs;          // values it reads and sends gradients to
  std::vector<int> outputs;         // values it makes; outputs[0] is the one that carries gradients on
  std::vector<int> tensors;         // parameters it reads; they get a gradient in its backward
  std::vector<int> keeps;           // values (inputs or outputs) that its backward reads
  int in_place = -1;                // index into inputs whose storage outputs[0] takes over; -1: own storage
  bool pointwise = false;           // cheap to run again: what recompute "selective" drops and makes anew
  std::int64_t rows_per_token = 1;  // GEMM rows = tokens x rows_per_token (experts a token)
  std::int64_t in_features = 0;     // linears and activation; per expert for grouped_linear
  std::int64_t out_features = 0;
  std::int64_t groups = 1;   // grouped_linear: experts
  AttentionShape attention;  // attention only
};

enum class BlockRole : std::uint8_t {
  embedding,  // tokens -> hidden
  layer,      // hidden -> hidden
  head,       // hidden -> loss: the graph's ops, then the chunked linear + cross-entropy over `vocab` (0: no loss head)
};

/// A kind of block; equal layers share one.
struct BlockKind {
  std::string name;  // "layer", "dense layer", "MoE layer", "encoder layer", "embedding", "head"
  BlockRole role = BlockRole::layer;
  std::vector<TensorSpec> tensors;  // in the order of the flat parameter buffer
  std::vector<Value> values;
  std::vector<GraphOp> ops;
  int input = -1;             // value that the block before hands over; -1 for embedding blocks
  int output = -1;            // value that goes on to the next block
  int memory = -1;            // value standing for the encoder output (cross attention); -1: none
  bool ends_encoder = false;  // its output is the encoder output that later blocks read as `memory`
  std::int64_t vocab = 0;     // head: rows of the output matrix
  int head_tensor = -1;       // head: the output matrix in `tensors` (a tied one has tied = true)
  int head_bias = -1;

  std::int64_t parameters() const;  // untied elements
  std::int64_t trainable_parameters() const;
};

/// What is asked of a model in one micro-step on one rank.
struct TokenShape {
  std::int64_t batch = 1;    // sequences
  std::int64_t seq_len = 1;  // tokens each
  std::int64_t tokens() const { return batch * seq_len; }
};

struct ModelSpec {
  std::string name;    // catalog name, or the file's folder or stem
  std::string family;  // model_type: "llama"
  std::string title;   // architectures[0] when given
  std::string source;  // "catalog: llama-2-70b" or the path
  std::string config;  // the configuration as one line of JSON: plan.json embeds it
  std::int64_t hidden = 0;
  std::int64_t num_layers = 0;     // layer blocks (encoder and decoder together)
  std::int64_t vocab = 0;          // 0 for ViT
  std::int64_t max_positions = 0;  // 0: not limited by the configuration
  bool tied_embeddings = false;
  std::vector<BlockKind> kinds;
  std::vector<int> sequence;            // kinds in execution order: embedding, layers, head
  std::vector<Assumption> assumptions;  // defaults taken for keys that the file leaves out
  std::vector<std::string> warnings;    // keys that we do not know and that might matter

  std::int64_t parameters() const;  // total, tied counted once
  std::int64_t trainable_parameters() const;
  std::int64_t active_parameters() const;  // routed experts scaled by experts a token / experts
};

/// FLOPs of the op's forward for one micro-step (1 multiply-add = 2). Attention counts the causal half (or the
/// window) exactly: mean keys (s + 1) / 2. Pointwise ops count 0 (transformer-math section 2.1).
Flops forward_flops(const GraphOp& op, TokenShape shape);
/// Data gradient + weight gradient: 2x forward for linears, 2.5x for fused attention (scores are formed again).
Flops backward_flops(const GraphOp& op, TokenShape shape);
/// FLOPs of the loss head's linear, forward.
Flops head_flops(const BlockKind& head, std::int64_t hidden, TokenShape shape);

enum class AttentionCount { full, causal };
/// Model FLOPs of one training micro-step (3 x forward, recompute not counted), by the stated attention count
/// (transformer-math section 2.2). Report the count with the number.
Flops model_flops(const ModelSpec& model, TokenShape shape, AttentionCount count);

/// Reads a Hugging Face config.json text. Throws InputError naming file:line, field, expected, found, and for an
/// unknown model_type the nearest supported family.
ModelSpec read_model(std::string_view text, const std::string& file_name);

/// What `--model` accepts (spec section 3): a catalog name, a size people type (70B), a config.json, or a directory
/// holding one. Throws InputError with the nearest names.
ModelSpec find_model(const std::string& name_or_path);

/// Names of the catalog, sorted.
std::vector<std::string> model_names();

/// Freezes every tensor and adds rank-r adapters [r, in] and [out, r] to each linear of the layers (LoRA). Norms,
/// embeddings and head get none. r in [1, hidden].
void apply_lora(ModelSpec& model, std::int64_t rank);
/// The same as a copy; rank 0 is the model itself.
ModelSpec adapted_model(const ModelSpec& model, std::int64_t rank);

/// One entry per tensor, names expanded; `layer` is -1 outside the layers. Tied tensors are listed with tied = true.
struct ListedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  int layer = -1;
  bool tied = false;
};
std::vector<ListedTensor> list_tensors(const ModelSpec& model);

}  // namespace zeroplan
