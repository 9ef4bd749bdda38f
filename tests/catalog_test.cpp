#include "models/catalog.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "models/json_reader.h"
#include "tests/catch.h"

using namespace zeroplan;
namespace fs = std::filesystem;

TEST_CASE("Every file of models/catalog is embedded byte for byte, sorted by path") {
  const fs::path root = fs::path(ZEROPLAN_SOURCE_DIR) / "models" / "catalog";
  CHECK(std::ranges::is_sorted(catalog_files(), {}, &CatalogFile::path));
  for (const CatalogFile& file : catalog_files()) {
    std::ifstream stream(root / file.path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    INFO(file.path);
    CHECK(text == file.text);
  }
  std::size_t on_disk = 0;
  if (fs::exists(root)) {
    for (const auto& entry : fs::recursive_directory_iterator(root)) on_disk += entry.path().extension() == ".json";
  }
  CHECK(catalog_files().size() == on_disk);
}

TEST_CASE("Every embedded file is found by its path and is valid JSON") {
  for (const CatalogFile& file : catalog_files()) {
    REQUIRE(find_catalog_file(file.path) == &file);
    CHECK_NOTHROW(JsonDocument::parse(file.text, std::string(file.path)));
  }
  CHECK(find_catalog_file("") == nullptr);
  CHECK(find_catalog_file("no/such.json") == nullptr);
  CHECK(find_catalog_file("~") == nullptr);
}
