// export_initial CONFIG DIRECTORY bf16|fp16|fp32 MAX_FILE_BYTES SEED: exports a model's initial weights, for
// tests/tools/check_export.py.

#include <cstdio>
#include <exception>
#include <vector>

#include "models/error.h"
#include "models/lower.h"
#include "runtime/export_weights.h"
#include "runtime/initial_weights.h"

using namespace zeroplan;

namespace {

DType type_of(std::string_view name) {
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    if (to_string(type) == name) return type;
  }
  throw InputError("expected bf16, fp16 or fp32");
}

void run(std::span<char*> arguments) {
  if (arguments.size() != 6) throw InputError("expected CONFIG DIRECTORY TYPE MAX_FILE_BYTES SEED");
  const ModelSpec model = find_model(arguments[1]);
  const InitialWeights weights(
      model, static_cast<std::uint64_t>(parse_integer(arguments[5], "SEED", 0, std::int64_t{1} << 62)));
  WeightExporter exporter(model, type_of(arguments[3]), arguments[2],
                          parse_integer(arguments[4], "MAX_FILE_BYTES", 1, std::int64_t{1} << 62));
  for (int block = 0; block < static_cast<int>(model.sequence.size()); ++block) {
    const int kind = model.sequence[static_cast<std::size_t>(block)];
    std::vector<float> flat(
        static_cast<std::size_t>(flat_layout(model.kinds[static_cast<std::size_t>(kind)], DType::fp32, 1).padded));
    weights.fill_flat(block, DType::fp32, 0, std::ssize(flat), flat);
    exporter.add_block_fp32(DType::fp32, flat);
  }
  exporter.finish();
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run({arguments, static_cast<std::size_t>(count)});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "export_initial: %s\n", error.what());
    return 2;
  }
}
