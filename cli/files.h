#pragma once
// Files that the user wants written. Failures are InputError: a path given by the user is input (spec section 3).

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "planner/exports.h"

namespace zeroplan {

/// Throws InputError that begins with the flag when the file is there, unless `overwrite`, or is no regular file.
void refuse_existing_file(const std::filesystem::path& path, bool overwrite, std::string_view flag);

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

  /// refuse_existing_file() of each.
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

/// A file that will be written, whole or not at all.
class OutputFile {
 public:
  /// Makes the folder that it goes to, as OutputFolder does. Throws InputError that begins with the flag: no file's
  /// name, a file that is there, unless `overwrite`, or a folder that cannot be written.
  OutputFile(const std::string& path, bool overwrite, std::string_view flag);
  /// Throws InputError.
  void write(const std::string& text);
  /// A note for each folder that was not there before: its name may be mistyped.
  std::vector<std::string> notes() const;

 private:
  std::string flag_, name_;
  OutputFolder folder_;
};

/// Throws InputError when the path of an output names the very file that is read.
void refuse_input_file(const std::string& output, const std::string& input, std::string_view what,
                       std::string_view flag);

}  // namespace zeroplan
