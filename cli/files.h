#pragma once
// Files that the user wants written. Failures are InputError: a path given by the user is input (spec section 3).

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "planner/exports.h"

namespace zeroplan {

/// A folder that will get files, written whole or not at all.
class OutputFolder {
 public:
  /// Makes the folder, with its parents, and proves that it can be written: before any work is done. What it made is
  /// removed by the destructor if nothing was written. Throws InputError.
  /// `flag` stands in messages.
  OutputFolder(const std::string& path, bool overwrite, std::string_view flag = "--out");
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  /// Throws InputError naming the first of these files that is there, unless `overwrite`, or that is no regular file.
  void refuse_existing(const std::vector<std::string>& names) const;
  /// All files under temporary names first, then renamed. A name may have a folder before it, "8xH100/plan.json", which
  /// is made. Throws InputError; nothing new is left behind then.
  void write(const std::vector<ExportFile>& files);
  /// The folders that were not there before, outermost first.
  std::vector<std::string> made() const;

 private:
  /// With its parents; what was missing is noted in made_. Throws InputError.
  void make(const std::filesystem::path& wanted);
  void remove_made();

  std::filesystem::path path_;
  std::vector<std::filesystem::path> made_;  // folders, outermost first
  bool overwrite_;
  std::string flag_;
  bool kept_ = false;
};

}  // namespace zeroplan
