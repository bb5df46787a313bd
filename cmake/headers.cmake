# pip builds in an environment of its own, whose folder has another name each time. Headers from there are copied into the build
# folder, or every source that includes one would be compiled anew.
function(needle_copy_headers from to)
  file(GLOB_RECURSE headers RELATIVE ${from} ${from}/*.h)
  foreach(header ${headers})
    get_filename_component(folder ${to}/${header} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    file(COPY_FILE ${from}/${header} ${to}/${header} ONLY_IF_DIFFERENT)
  endforeach()
endfunction()
