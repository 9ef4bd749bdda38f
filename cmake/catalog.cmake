# zeroplan_embed_catalog(TARGET DIR): compiles DIR/**/*.json into TARGET, see models/catalog.h.
function(zeroplan_embed_catalog target dir)
  file(GLOB_RECURSE paths CONFIGURE_DEPENDS RELATIVE "${dir}" "${dir}/*.json")
  list(SORT paths)
  list(JOIN paths "\n" lines)
  set(list "${CMAKE_CURRENT_BINARY_DIR}/catalog_files.txt")
  set(output "${CMAKE_CURRENT_BINARY_DIR}/catalog_files.cpp")
  # A file that is removed changes no time stamp but this one. Written only when it differs.
  file(CONFIGURE OUTPUT "${list}" CONTENT "${lines}\n" @ONLY)
  list(TRANSFORM paths PREPEND "${dir}/" OUTPUT_VARIABLE depends)
  set(script "${PROJECT_SOURCE_DIR}/cmake/embed_catalog.cmake")
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${CMAKE_COMMAND}" "-DCATALOG_DIR=${dir}" "-DLIST=${list}" "-DOUTPUT=${output}" -P "${script}"
    DEPENDS ${depends} "${list}" "${script}"
    COMMENT "Embedding the catalog"
    VERBATIM)
  target_sources(${target} PRIVATE "${output}")
endfunction()
