// Parameters of the 124 catalog models against published counts (tests/data/models/README.md).

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "tests/catch.h"
#include "tests/model_test_support.h"
#include "tests/processor_time.h"

using namespace zeroplan;
using zeroplan::test::data_path;
using zeroplan::test::read_csv;

namespace {

using Shapes = std::map<std::vector<std::int64_t>, std::int64_t>;

std::vector<std::int64_t> parse_shape(const std::string& text) {
  std::vector<std::int64_t> shape(1, 0);
  for (const char c : text) {
    if (c == 'x') {
      shape.push_back(0);
    } else {
      shape.back() = shape.back() * 10 + (c - '0');
    }
  }
  return shape;
}

std::map<std::string, Shapes> expected_shapes() {
  std::map<std::string, Shapes> shapes;
  for (const auto& row : read_csv(data_path("param_shapes.csv"))) {
    if (row.at(5) != "yes") shapes[row[0]][parse_shape(row[2])] += std::stoll(row[3]);
  }
  return shapes;
}

Shapes shapes_of(const ModelSpec& model) {
  Shapes shapes;
  for (const ListedTensor& tensor : list_tensors(model)) {
    if (!tensor.tied) ++shapes[tensor.shape];
  }
  return shapes;
}

}  // namespace

TEST_CASE("Every catalog model has exactly the published number of parameters") {
  const auto rows = read_csv(data_path("param_counts.csv"));
  REQUIRE(rows.size() == 124);
  CHECK(model_names().size() == 124);
  for (const auto& row : rows) {
    const ModelSpec model = find_model(row[0]);
    CAPTURE(row[0]);
    CHECK(model.parameters() == std::stoll(row[1]));
    CHECK(model.trainable_parameters() == model.parameters());
    CHECK(model.active_parameters() == (row[8].empty() ? model.parameters() : std::stoll(row[8])));
    const bool tied = row[2] == "yes";
    CHECK((model.vocab == 0 || model.tied_embeddings == tied));
  }
}

TEST_CASE("Every catalog model lists exactly the published tensor shapes") {
  for (const auto& [name, shapes] : expected_shapes()) {
    CAPTURE(name);
    CHECK(shapes_of(find_model(name)) == shapes);
  }
}

TEST_CASE("Listed tensor names are distinct and know their layer") {
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    CAPTURE(name);
    std::set<std::string> names;
    int last_layer = -1;
    for (const ListedTensor& tensor : list_tensors(model)) {
      CHECK(tensor.name.find('{') == std::string::npos);
      if (!names.insert(tensor.name).second) FAIL_CHECK("twice: " << tensor.name);
      last_layer = std::max(last_layer, tensor.layer);
    }
    CHECK(last_layer + 1 == model.num_layers);
  }
}

TEST_CASE("Catalog models raise no warning and read back from their own configuration") {
  for (const std::string& name : model_names()) {
    const ModelSpec model = find_model(name);
    CAPTURE(name);
    for (const std::string& warning : model.warnings) FAIL_CHECK(warning);
    CHECK(model.config.find('\n') == std::string::npos);
    const ModelSpec again = read_model(model.config, name + ".json");
    CHECK(again.config == model.config);
    CHECK(again.parameters() == model.parameters());
    CHECK(again.assumptions == model.assumptions);
    CHECK(again.sequence == model.sequence);
  }
}

TEST_CASE("A changed vocabulary changes the count once or twice") {
  const ModelSpec tied = find_model("llama-3.2-1b");
  std::string config = tied.config;
  config.replace(config.find("\"vocab_size\": 128256"), 20, "\"vocab_size\": 128320");
  CHECK(read_model(config, "x.json").parameters() == tied.parameters() + 64 * tied.hidden);
}

TEST_CASE("The catalog is read fast", "[.slow]") {
  const double start = tests::processor_seconds();
  for (const std::string& name : model_names()) CHECK(find_model(name).parameters() > 0);
  const double again = tests::processor_seconds(), all = again - start;
  constexpr int kRounds = 100;
  for (int i = 0; i < kRounds; ++i) CHECK(find_model("70B").num_layers == 80);
  const double one = (tests::processor_seconds() - again) / kRounds;
  WARN(fmt::format("124 models {:.1f} ms, 70B {:.3f} ms", all * 1e3, one * 1e3));
  CHECK(all < 0.4);
  CHECK(one < 1.5e-3);
}
