#include "kernels.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

namespace needle::sim::ptx {

namespace {

std::map<std::string, const KernelOfPtx*>& by_name() {
  static std::map<std::string, const KernelOfPtx*> kernels;
  return kernels;
}

// The mangled names of this module's functions, by their distance from its beginning. The dynamic
// linker knows only those that other modules may call, so the file's own table is read.
std::map<uintptr_t, std::string> names_of_functions() {
  Dl_info module;
  dladdr(reinterpret_cast<const void*>(&by_name), &module);
  std::ifstream in(module.dli_fname, std::ios::binary);
  if (!in) in.open("/proc/self/exe", std::ios::binary);  // a program that was found on PATH
  const std::string file{std::istreambuf_iterator<char>(in), {}};
  const auto at = [&](auto& record, size_t offset) {
    if (offset + sizeof record > file.size()) throw std::runtime_error("ptx: no ELF file");
    std::memcpy(&record, file.data() + offset, sizeof record);
  };
  ElfW(Ehdr) header;
  at(header, 0);
  const auto section = [&](size_t i) {
    ElfW(Shdr) found;
    at(found, header.e_shoff + i * sizeof found);
    return found;
  };
  std::map<uintptr_t, std::string> names;
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const ElfW(Shdr) table = section(i);
    if (table.sh_type != SHT_SYMTAB) continue;
    const size_t strings = section(table.sh_link).sh_offset;
    for (size_t offset = 0; offset < table.sh_size; offset += sizeof(ElfW(Sym))) {
      ElfW(Sym) symbol;
      at(symbol, table.sh_offset + offset);
      if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
        names[symbol.st_value] = file.data() + strings + symbol.st_name;
    }
  }
  return names;
}

}  // namespace

bool register_kernels(const KernelOfPtx* kernels, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto [entry, is_new] = by_name().emplace(kernels[i].name, &kernels[i]);
    if (!is_new && entry->first.find("_GLOBAL__N_") != std::string::npos) entry->second = nullptr;
  }
  return true;
}

const KernelOfPtx& kernel_of(const void* function) {
  static const std::map<uintptr_t, std::string> names = names_of_functions();
  Dl_info module;
  dladdr(function, &module);
  const auto name = names.find(reinterpret_cast<uintptr_t>(function) -
                               reinterpret_cast<uintptr_t>(module.dli_fbase));
  const std::string wanted = name == names.end() ? "a kernel without a symbol" : name->second;
  const auto found = by_name().find(wanted);
  if (found == by_name().end()) throw std::runtime_error("ptx: nvcc has no " + wanted);
  if (found->second == nullptr) throw std::runtime_error("ptx: two files have a " + wanted);
  return *found->second;
}

void run(const KernelOfPtx& kernel, char* params) {
  const dim3 block = self().block->block_dim;
  if (block.x * block.y * block.z > kernel.max_threads)
    fault("more threads than the __launch_bounds__ of " + std::string(kernel.name), {"", 0});
  kernel.run(params);
}

void misaligned(const char* instruction, size_t bytes, Site site) {
  fault(
      "misaligned address: " + std::string(instruction) + " of " + std::to_string(bytes) + " bytes",
      site);
}

}  // namespace needle::sim::ptx
