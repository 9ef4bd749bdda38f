#include "runtime/probe_kernels.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "runtime/adam.h"
#include "runtime/kernels/kernels.h"

namespace zeroplan {
namespace {

constexpr std::int64_t kMostElements = std::int64_t{1} << 24;  // of the inputs of one sample

/// Memory that samples of one element type share: what they read stays as it is, what they write is never read.
template <class T>
struct Workspace {
  std::vector<T> inputs;
  std::vector<float> outputs;  // of any storage type
  ThreadPool pool{1};

  Workspace() : inputs(kMostElements), outputs(kMostElements) {
    constexpr std::size_t kCycle = 101, kStride = 37;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = narrow<T>(static_cast<float>(i * kStride % kCycle) * 0.01f - 0.5f);
    }
  }
};

/// Adds samples of one type. Operands of one sample lie one after the other.
template <class T>
class Samples {
 public:
  explicit Samples(const HostKernels& host) : host_(host), work_(std::make_shared<Workspace<T>>()) {}

  std::vector<ProbeSample> take() {
    linears();
    attentions();
    norms();
    rotaries();
    activations();
    embeddings();
    losses();
    sums();
    adams();
    return std::move(samples_);
  }

 private:
  static constexpr DType type() {
    if constexpr (std::is_same_v<T, Bf16>) return DType::bf16;
    if constexpr (std::is_same_v<T, Fp16>) return DType::fp16;
    return DType::fp32;
  }
  static Bytes bytes(std::int64_t elements) { return bytes_of(elements, type()); }
  /// The next `count` elements of what samples read.
  std::span<const T> in(std::int64_t count) {
    return std::span(work_->inputs).subspan(place(read_, count), size(count));
  }
  /// The next `count` elements of what samples write.
  template <class Out = T>
  std::span<Out> out(std::int64_t count) {
    return {reinterpret_cast<Out*>(work_->outputs.data() + place(written_, count)), size(count)};
  }
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  static std::size_t place(std::int64_t& next, std::int64_t count) {
    constexpr std::int64_t kLine = 64;
    if (next + count > kMostElements) throw std::logic_error("probe: a sample is too large");
    return size(std::exchange(next, (next + count + kLine - 1) / kLine * kLine));
  }
  void add(std::string_view kernel, HostCounts counts, std::function<void()> run) {
    samples_.push_back({std::string(kernel), type(), std::move(counts), std::move(run)});
    read_ = written_ = 0;
  }

  void linears() {
    // tokens, in, out: from tiny models to what 50 M parameters have, and lopsided ones that tell the terms apart.
    static constexpr std::array<std::int64_t, 3> kShapes[] = {
        {64, 64, 64},      {128, 128, 128},  {128, 128, 352},  {128, 352, 128}, {128, 128, 512},
        {512, 256, 256},   {512, 256, 1024}, {256, 1024, 256}, {512, 768, 768}, {96, 64, 2048},
        {1024, 512, 1536}, {32, 1024, 1024}, {1024, 64, 64},   {16, 256, 256},  {1024, 384, 4096}};
    for (const auto& [tokens, in_width, out_width] : kShapes) linear(tokens, in_width, out_width);
  }
  void linear(std::int64_t tokens, std::int64_t in_width, std::int64_t out_width) {
    for (const bool distant : {false, true}) {
      forward(tokens, in_width, out_width, distant);
      data(tokens, in_width, out_width, distant);
      weight(tokens, in_width, out_width, distant);
    }
    bias(tokens, out_width);
  }
  /// The weight that a run reads, or the gradient that it writes: always the same, or each time another one of so many
  /// that none is in a cache any more when its turn comes again.
  template <class Element>
  class Turns {
   public:
    Turns(std::span<Element> all, std::int64_t each, bool distant)
        : all_(all), each_(size(each)), turns_(distant ? all.size() / each_ : 1) {}
    std::span<Element> next() { return all_.subspan(each_ * (++turn_ % turns_), each_); }

   private:
    std::span<Element> all_;
    std::size_t each_, turns_, turn_ = 0;
  };
  static double distant_part(bool distant, std::int64_t elements) {
    return distant ? static_cast<double>(elements) : 0;
  }
  std::span<const T> weights(std::int64_t each, bool distant) { return distant ? in(kMostElements - read_) : in(each); }
  /// What forward kept and backward reads: other memory at each run, so that it comes from the cache that cores share,
  /// as in a step. The pool has kept_elements(each).
  std::int64_t kept_elements(std::int64_t each) const {
    constexpr std::int64_t kMostKept = kMostElements / 4;
    const auto shared = static_cast<std::int64_t>(host_.shared_memory.base()) / size_of(type());
    return std::max(each, std::min(shared, kMostKept));
  }
  Turns<const T> kept(std::int64_t each) { return Turns<const T>(in(kept_elements(each)), each, true); }
  Bytes kept_bytes(Bytes moved) const { return std::max(moved, host_.shared_memory); }

  void forward(std::int64_t tokens, std::int64_t in_width, std::int64_t out_width, bool distant) {
    const std::int64_t each = in_width * out_width;
    const auto x = in(tokens * in_width);
    add("linear forward", matmul_counts(host_, tokens, out_width, in_width, false, 1, distant_part(distant, each)),
        [=, work = work_, y = out(tokens * out_width),
         w = Turns<const T>(weights(each, distant), each, distant)]() mutable {
          const std::array<LinearPart<T>, 1> parts{{{w.next(), {}}}};
          linear_forward<T>(x, parts, in_width, y, work->pool);
        });
  }
  void data(std::int64_t tokens, std::int64_t in_width, std::int64_t out_width, bool distant) {
    const std::int64_t each = in_width * out_width;
    const auto dy = in(tokens * out_width);
    add("linear backward data",
        matmul_counts(host_, tokens, in_width, out_width, false, 1, distant_part(distant, each)),
        [=, work = work_, dx = out(tokens * in_width),
         w = Turns<const T>(weights(each, distant), each, distant)]() mutable {
          const std::array<LinearPart<T>, 1> parts{{{w.next(), {}}}};
          linear_backward_data<T>(dy, parts, in_width, {dx, {}}, work->pool);
        });
  }
  void weight(std::int64_t tokens, std::int64_t in_width, std::int64_t out_width, bool distant) {
    const std::int64_t each = in_width * out_width;
    const auto dy = in(tokens * out_width), x = in(tokens * in_width);
    add("linear backward weight",
        matmul_counts(host_, out_width, in_width, tokens, false, 1, distant_part(distant, each)),
        [=, work = work_, dw = Turns<T>(out(distant ? kMostElements : each), each, distant)]() mutable {
          const std::array<LinearPartGradient<T>, 1> parts{{{{dw.next(), false}, {}}}};
          linear_backward_weight<T, T>(dy, x, parts, in_width, work->pool);
        });
  }
  /// What a bias adds to a weight gradient: the same call with and without it is no small difference, so a product of
  /// depth 1 stands for the call.
  void bias(std::int64_t tokens, std::int64_t out_width) {
    const auto dy = in(tokens * out_width), x = in(tokens);
    add("bias backward", elements_counts(host_, tokens * out_width, bytes(tokens * out_width)),
        [=, work = work_, dw = out(out_width), db = out(out_width)] {
          const std::array<LinearPartGradient<T>, 1> parts{{{{dw, false}, {db, false}}}};
          linear_backward_weight<T, T>(dy, x, parts, 1, work->pool);
        });
  }

  void attentions() {
    // sequences, tokens of each, query heads, key heads, head dimension
    static constexpr std::array<std::int64_t, 5> kShapes[] = {
        {2, 64, 4, 2, 32},   {4, 32, 2, 2, 32},   {2, 128, 4, 4, 64}, {1, 256, 4, 4, 64}, {1, 512, 4, 2, 64},
        {1, 1024, 2, 2, 64}, {2, 256, 2, 2, 128}, {8, 64, 4, 4, 64},  {1, 64, 1, 1, 16},  {1, 512, 2, 2, 16}};
    for (const auto& s : kShapes) {
      AttentionShape shape;
      shape.heads = s[2], shape.kv_heads = s[3];
      shape.qk_dim = shape.v_dim = s[4];
      attention(shape, {s[0], s[1]});
    }
  }
  void attention(const AttentionShape& shape, TokenShape tokens) {
    const std::int64_t n = tokens.tokens(), packed = (shape.heads + 2 * shape.kv_heads) * shape.qk_dim;
    const HostCounts counts = attention_counts(host_, shape, tokens);
    const auto qkv = in(n * packed);
    add("attention forward", counts,
        [=, work = work_, y = out(n * shape.heads * shape.qk_dim), saved = out<float>(n * shape.heads)] {
          attention_forward<T>(shape, tokens.seq_len, qkv, y, saved, work->pool);
        });
    const auto dout = in(n * shape.heads * shape.qk_dim);
    const auto qkv_turns = kept(n * packed), y_turns = kept(n * shape.heads * shape.qk_dim);
    // Large sums: the probabilities stay below 1 whatever q and k are.
    const auto saved = std::make_shared<std::vector<float>>(size(n * shape.heads), 8.0f);
    add("attention backward", counts,
        [=, work = work_, dqkv = out(n * packed), kept_qkv = qkv_turns, kept_y = y_turns]() mutable {
          attention_backward<T>(shape, tokens.seq_len, dout, kept_qkv.next(), kept_y.next(), *saved, {dqkv, {}},
                                work->pool);
        });
  }

  // rows x width of kernels that go row by row
  static constexpr std::array<std::int64_t, 2> kRowShapes[] = {{128, 128}, {64, 512},   {512, 256},
                                                               {1024, 64}, {1024, 512}, {1024, 2048}};

  void norms() {
    for (const auto& [rows, width] : kRowShapes) {
      for (const NormFunction function : {NormFunction::rms, NormFunction::layer}) norm(function, rows, width);
    }
  }
  void norm(NormFunction function, std::int64_t rows, std::int64_t width) {
    const bool rms = function == NormFunction::rms;
    const NormShape shape{function, width, 1e-5};
    const std::int64_t statistics = rms ? rows : 2 * rows, with_bias = rms ? 0 : width;
    const std::string name = rms ? "norm rms " : "norm layer ";
    {
      const auto x = in(rows * width), w = in(width), b = in(with_bias);
      add(name + "forward", rows_counts(host_, rows, width, bytes(2 * rows * width)),
          [=, work = work_, y = out(rows * width), saved = out<float>(statistics)] {
            norm_forward<T>(shape, x, w, b, y, saved, work->pool);
          });
    }
    for (const bool far : {false, true}) norm_backward_of(name, shape, rows, with_bias, statistics, far);
  }
  /// Added to the residual's gradient, as in every layer but the last. `far`: that and the input were not touched just
  /// before.
  void norm_backward_of(const std::string& name, const NormShape& shape, std::int64_t rows, std::int64_t with_bias,
                        std::int64_t statistics, bool far) {
    const std::int64_t width = shape.width, each = rows * width;
    const Bytes moved = bytes(4 * each);
    const auto dy = in(each), w = in(width);
    const auto x = far ? kept(each) : Turns<const T>(in(each), each, false);
    const auto saved = std::make_shared<std::vector<float>>(size(statistics), 1.0f);
    const auto residual = std::make_shared<std::vector<T>>(size(far ? kept_elements(each) : each));
    add(name + "backward", rows_counts(host_, rows, width, far ? kept_bytes(moved) : moved),
        [=, work = work_, dw = out(width), db = out(with_bias), inputs = x,
         gradients = Turns<T>(std::span(*residual), each, true)]() mutable {
          const std::span<T> dx = gradients.next();
          norm_backward<T, T>(shape, dy, inputs.next(), w, *saved, {dx, dx}, {dw, false}, {db, false}, work->pool);
          (void)residual;  // keeps the gradients' memory
        });
  }

  void rotaries() {
    // tokens, heads, head dimension; a sequence has 64 tokens
    static constexpr std::array<std::int64_t, 3> kShapes[] = {{128, 2, 32},  {64, 4, 64},   {512, 2, 64},
                                                              {1024, 1, 16}, {1024, 4, 64}, {1024, 8, 128}};
    for (const auto& [tokens, heads, d] : kShapes) {
      AttentionShape shape;
      shape.heads = shape.kv_heads = heads;
      shape.qk_dim = shape.v_dim = d;
      rotary(shape, tokens);
    }
  }
  void rotary(const AttentionShape& shape, std::int64_t tokens) {
    constexpr std::int64_t kSequence = 64;
    const std::int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.qk_dim;
    const auto table = std::make_shared<RotaryTable>(make_rotary_table(kSequence, shape.qk_dim, 10000.0));
    const auto turned = std::make_shared<std::vector<T>>(work_->inputs.begin(), work_->inputs.begin() + tokens * width);
    const HostCounts counts = rows_counts(host_, tokens, width, bytes(2 * tokens * width));
    add("rotary forward", counts,
        [=, work = work_] { rotary_forward<T>(shape, kSequence, *table, *turned, work->pool); });
    const auto dy = in(tokens * width);
    add("rotary backward", counts, [=, work = work_, dx = out(tokens * width)] {
      rotary_backward<T>(shape, kSequence, *table, dy, {dx, {}}, work->pool);
    });
  }

  static constexpr std::int64_t kElements[] = {1 << 12, 1 << 14, 1 << 16, 1 << 19, 1 << 21};

  void activations() {
    using enum ActivationFunction;
    for (const auto& [function, name] :
         {std::pair{silu, "silu"}, {gelu_tanh, "gelu_tanh"}, {gelu_erf, "gelu_erf"}, {relu, "relu"}}) {
      for (const bool gated : {false, true}) {
        if (function == relu && gated) continue;
        for (const std::int64_t count : kElements)
          activation(function, std::string(name) + (gated ? " gated" : ""), gated, count);
      }
    }
  }
  void activation(ActivationFunction function, const std::string& name, bool gated, std::int64_t count) {
    constexpr std::int64_t kWidth = 512;
    const ActivationShape shape{function, gated, kWidth};
    const std::int64_t inputs = gated ? 2 * count : count;
    {
      const auto x = in(inputs);
      add(name + " forward", elements_counts(host_, count, bytes(inputs + count)),
          [=, work = work_, y = out(count)] { activation_forward<T>(shape, x, y, work->pool); });
    }
    for (const bool far : {false, true}) {
      const auto dy = in(count);
      const auto x = far ? kept(inputs) : Turns<const T>(in(inputs), inputs, false);
      const Bytes moved = bytes(2 * inputs + count);
      add(name + " backward", elements_counts(host_, count, far ? kept_bytes(moved) : moved),
          [=, work = work_, dx = out(inputs), turns = x]() mutable {
            activation_backward<T>(shape, dy, turns.next(), {dx, {}}, work->pool);
          });
    }
  }

  void embeddings() {
    for (const auto& [tokens, hidden] : kRowShapes) embedding(tokens, hidden);
  }
  void embedding(std::int64_t tokens, std::int64_t hidden) {
    constexpr std::int64_t kVocab = 4096;  // a table that is not in near memory
    constexpr std::size_t kStride = 1571;
    const auto ids = std::make_shared<std::vector<std::int32_t>>(size(tokens));
    for (std::size_t i = 0; i < ids->size(); ++i) (*ids)[i] = static_cast<std::int32_t>(i * kStride % kVocab);
    const HostCounts counts = rows_counts(host_, tokens, hidden, bytes(2 * tokens * hidden));
    // Rows that were last read a step ago: each run reads others of a table that has as many as there is memory.
    const std::int64_t rows = kMostElements / hidden;
    const auto table = in(rows * hidden);
    const auto seen = std::make_shared<std::vector<std::int32_t>>(size(rows));
    for (std::size_t i = 0; i < seen->size(); ++i) {
      (*seen)[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i * kStride) % rows);
    }
    add("embedding forward", counts,
        [=, work = work_, y = out(tokens * hidden),
         turns = Turns<std::int32_t>(std::span(*seen), tokens, true)]() mutable {
          embedding_forward<T>(turns.next(), tokens, hidden, table, {}, y, work->pool);
          (void)seen;  // keeps the ids' memory
        });
    const auto dy = in(tokens * hidden);
    const auto gradient = std::make_shared<std::vector<T>>(size(kVocab * hidden));
    add("embedding backward", counts, [=, work = work_] {
      embedding_backward<T, T>(*ids, tokens, hidden, dy, {*gradient, true}, {}, work->pool);
    });
  }

  void losses() {
    static constexpr std::array<std::int64_t, 2> kShapes[] = {
        {64, 512}, {128, 512}, {512, 128}, {256, 2048}, {128, 8192}};
    for (const auto& [rows, vocab] : kShapes) {
      const auto logits = std::make_shared<std::vector<T>>(work_->inputs.begin(), work_->inputs.begin() + rows * vocab);
      const auto targets = std::make_shared<std::vector<std::int32_t>>(size(rows), 5);
      add("loss", rows_counts(host_, rows, vocab, bytes(3 * rows * vocab)),
          [=, work = work_, v = vocab] { (void)cross_entropy<T>(*logits, v, *targets, 1.0, 0.0, work->pool); });
    }
  }

  static constexpr std::int64_t kLargeArray = 1 << 22;

  void sums() {
    for (const std::int64_t count :
         {kElements[0], kElements[1], kElements[2], kElements[3], kElements[4], kLargeArray}) {
      const auto a = in(count), b = in(count);
      add("add", elements_counts(host_, count, bytes(3 * count)), [=, work = work_, y = out(count)] {
        const std::array<std::span<const T>, 2> terms{a, b};
        add_forward<T>(terms, y, work->pool);
      });
      const auto gradient = in(count);
      const auto sum = std::make_shared<std::vector<float>>(size(count));
      add("accumulate", elements_counts(host_, count, bytes(count) + 2.0 * bytes_of(count, DType::fp32)),
          [=, work = work_] { accumulate<T, float>(gradient, *sum, work->pool); });
      const auto squared = in(count);
      add("gradient norm", elements_counts(host_, count, bytes(count)), [=, work = work_] {
        ExactSum norm;
        sum_of_squares<T>(squared, norm, work->pool);
      });
    }
  }

  void adams() {
    for (const std::int64_t count : {kElements[0], kElements[1], kElements[2], kElements[3], kLargeArray}) adam(count);
  }
  /// fp32 gradients and moments; 16-bit weights with an fp32 master. Counted in bytes: other layouts move fewer.
  void adam(std::int64_t count) {
    struct States {
      std::vector<float> gradient, master, first, second;
      std::vector<T> weights;
    };
    const std::size_t n = size(count);
    const auto states =
        std::make_shared<States>(States{std::vector<float>(n, 0.01f), std::vector<float>(n, 0.5f),
                                        std::vector<float>(n), std::vector<float>(n), std::vector<T>(n)});
    constexpr bool kNarrow = !std::is_same_v<T, float>;
    const Bytes traffic = 7.0 * bytes_of(count, DType::fp32) + (kNarrow ? bytes(count) : Bytes());
    const auto moved = static_cast<std::int64_t>(traffic.base());
    add("adam", elements_counts(host_, moved, traffic), [=, work = work_] {
      AdamRange range;
      range.count = count;
      range.gradient = states->gradient.data();
      range.gradient_type = DType::fp32;
      range.master = states->master.data();
      range.first_moment = states->first.data();
      range.second_moment = states->second.data();
      if constexpr (kNarrow) range.weights = states->weights.data();
      range.weights_type = type();
      adam_step(adam_scalars({}, 1, 1.0), range, work->pool);
    });
  }

  const HostKernels& host_;
  std::shared_ptr<Workspace<T>> work_;
  std::int64_t read_ = 0, written_ = 0;
  std::vector<ProbeSample> samples_;
};

/// What works on bytes.
std::vector<ProbeSample> byte_samples(const HostKernels& host) {
  std::vector<ProbeSample> samples;
  constexpr std::int64_t kMostBytes = 1 << 25;
  const auto from = std::make_shared<std::vector<std::byte>>(kMostBytes),
             to = std::make_shared<std::vector<std::byte>>(kMostBytes);
  for (std::int64_t count = 1 << 12; count <= kMostBytes; count *= 8) {
    const auto n = static_cast<std::size_t>(count);
    const Bytes each = bytes_of(count, DType::u8);
    samples.push_back({"copy", DType::u8, elements_counts(host, count, 2.0 * each),
                       [=] { std::memcpy(to->data(), from->data(), n); }});
    samples.push_back({"clear", DType::u8, elements_counts(host, count, each), [=] { std::memset(to->data(), 0, n); }});
  }
  return samples;
}

}  // namespace

std::vector<ProbeSample> probe_samples(DType type, const HostKernels& host) {
  if (type == DType::u8) return byte_samples(host);
  return with_storage(type, [&](auto storage) { return Samples<typename decltype(storage)::Type>(host).take(); });
}

}  // namespace zeroplan
