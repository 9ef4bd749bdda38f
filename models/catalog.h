#pragma once
// The files of models/catalog/, embedded at build time: the program runs from any folder.

#include <span>
#include <string_view>

namespace zeroplan {

/// One embedded file. Both views live as long as the program.
struct CatalogFile {
  std::string_view path;  // below models/catalog, e.g. "models/llama-2-70b.json"
  std::string_view text;
};

/// All files, sorted by path (byte order).
std::span<const CatalogFile> catalog_files();

/// The file of that path, or nullptr.
const CatalogFile* find_catalog_file(std::string_view path);

}  // namespace zeroplan
