"""Translates the PTX that nvcc makes of a .cu file to C++ that the emulator runs: translate.py IN.ptx OUT.cc

All that is done here is syntax: a register becomes a variable, a branch a goto, an instruction the call of a function of its name.
What it does is in instructions.h: `fma.rn.f32 %f1, %f2, %f3, %f4` becomes `set(r_f1, op_fma_rn<float>(r_f2, r_f3, r_f4))`, and an
instruction that is not there is refused. source: PTX ISA 9.0, chapters 4 to 9.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TYPES = {
    "pred": "bool", "f32": "float", "f64": "double", "f16": "float16", "bf16": "bfloat16", "tf32": "tf32",
    "f16x2": "two<float16>", "bf16x2": "two<bfloat16>",
    **{f"{letter}{bits}": f"uint{bits}_t" for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
}  # fmt: skip
# Operands that are not of the instruction's type: their index behind the result, and what they are read as.
OTHER_OPERANDS = {
    "op_selp": (2, "bool"), "op_vote_sync_ballot": (0, "bool"), "op_mad_wide": (2, "raw"),
    "op_shl": (1, "uint32_t"), "op_shr": (1, "uint32_t"),
}  # fmt: skip
SPACES = {"global", "const", "shared", "local", "param"}
KNOWN = set(re.findall(r"\bop_\w+", (Path(__file__).parent / "instructions.h").read_text()))
FUNCTIONS = {"vprintf": "printf", "__assertfail": "assert"}  # that nvcc calls for these
# nvcc's name of an anonymous namespace tells the file, and the C++ compiler's does not.
ANONYMOUS = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_\w+_([0-9a-f]{8}|main)(_\d+)?")


def cpp_name(name: str) -> str:
    return name.replace("%", "r_").replace("$", "L_").replace(".", "_")


def mangled(name: str) -> str:
    """The C++ compiler's mangled name of the kernel that nvcc calls `name`."""
    done, rest = "", name
    while match := re.search(r"(\d+)(?=_GLOBAL__N__)", rest):
        digits, tail = match[1], rest[match.end() :]
        # The name before may end in digits, too: the number is as long as what follows it.
        lengths = [(i, int(digits[i:])) for i in range(len(digits)) if ANONYMOUS.fullmatch(tail[: int(digits[i:])])]
        if not lengths:
            raise SyntaxError(f"no anonymous namespace: {name}")
        start, length = lengths[0]
        done += rest[: match.start() + start] + "12_GLOBAL__N_1"
        rest = tail[length:]
    return done + rest


def split(text: str) -> list[str]:
    """The operands of an instruction: "%r1, {%r2, %r3}, [%r4]" has three."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,])+", text) if part.strip()]


def statements(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """The statements of a function, with the numbers of their lines; a brace or a label is one, too."""
    text = ""
    for number, line in enumerate(lines, first):
        for piece in re.split(r"(;)|(?<![\w$])(\$?\w+:)(?!:)", line):
            if piece is None or not (text + piece).strip():
                continue
            if piece == ";":
                yield number, " ".join(text.split())
                text = ""
            elif piece.endswith(":"):
                yield number, piece
            else:
                text += piece + " "
                while (brace := text.lstrip()[:1]) and brace in "{}":  # not one of a list of operands, which begins no statement
                    yield number, brace
                    text = text.lstrip()[1:]


def bytes_of(text: str) -> tuple[int, int, str]:
    """Alignment, size and name of what is declared as a .param, .local or .shared."""
    pointer = r"(?: \.ptr(?: \.\w+)?(?: \.align \d+)?)?"
    match = re.fullmatch(rf"\.(?:param|local|shared) (?:\.align (\d+) )?\.\w(\d+){pointer} ([\w$]+)(?:\[(\d+)\])?", text)
    if not match:
        raise ValueError(f"{text} is not known")
    align, bits, name, count = match.groups()
    size = int(bits) // 8
    return int(align or size), size * int(count or 1), name


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else repr(error)


class Module:
    """A .ptx file: `code` is what it becomes."""

    def __init__(self, path: Path):
        self.file = path.name
        self.symbols: dict[str, str] = {}  # of the module: name -> a C++ expression for its address
        self.unknown: dict[str, str] = {}  # name -> why what is declared so cannot be used
        self.code: list[str] = []
        self.kernels: list[str] = []
        lines = [line.split("//")[0].rstrip() for line in path.read_text().split("\n")]
        i = 0
        while i < len(lines):
            try:
                if re.match(r"(\.visible |\.weak )?\.(entry|func)\b", lines[i]):
                    i = self.function(lines, i)
                elif match := re.match(r"\.extern \.func .*?([\w$]+)$", lines[i]):
                    self.unknown[match[1]] = f"{FUNCTIONS.get(match[1], match[1])} is not known"
                    i = next(end for end in range(i, len(lines)) if lines[end].endswith(";"))
                elif lines[i] and not re.match(r"\.(version|target|address_size)\b", lines[i]):
                    self.variable(lines[i].rstrip(";"))
            except (ValueError, KeyError, IndexError, StopIteration) as error:
                raise SyntaxError(f"{self.file}:{i + 1}: {lines[i]}: {reason(error)}") from error
            i += 1

    def variable(self, text: str) -> None:
        if match := re.fullmatch(r"\.(?:global|const) \.align (\d+) \.b8 ([\w$]+)\[(\d+)\] = (\{.*\})", text):
            align, name, size, values = match.groups()
            self.code.append(f"alignas({align}) uint8_t {cpp_name(name)}[{size}] = {values};")
            self.symbols[name] = cpp_name(name)
        elif match := re.fullmatch(r"\.extern \.shared \.align \d+ \.b8 ([\w$]+)\[\]", text):
            self.symbols[match[1]] = "shared_address(needle::sim::dynamic_shared())"
        elif text.lstrip().startswith(".shared"):
            align, size, name = bytes_of(text.strip())
            declared = f"declared_{cpp_name(name)}"
            self.code.append(f"const char {declared} = 0;")
            variable = re.sub(r".*E\d+", "", name)  # without the functions that it is in
            self.symbols[name] = f'shared_address(needle::sim::shared_memory(&{declared}, "{variable}", {size}, {align}))'
        elif match := re.fullmatch(r"(?:\.\w+ )?\.(global|const) \.align \d+ \.\w+ ([\w$]+)(?:\[\d*\])?(?: = .*)?", text):
            kind = "__device__" if match[1] == "global" else "__constant__"
            self.unknown[match[2]] = f"a {kind} variable is not known: host and kernels would each have one"
        else:
            raise ValueError("not known")

    def function(self, lines: list[str], start: int) -> int:
        """The function whose head begins at line `start`. Returns the index of its last line."""
        end = next(i for i in range(start, len(lines)) if lines[i] in ("{", ";"))
        head = " ".join(lines[start:end])
        function = Function(self, head)
        if lines[end] == ";":
            self.code.append(f"{function.signature};")
            return end
        close, depth = end, 1
        while depth > 0:
            close += 1
            depth += lines[close].count("{") - lines[close].count("}")
        for number, text in statements(lines[end + 1 : close], end + 2):
            try:
                function.statement(text, f'PLACE("{self.file}", {number})')
            except (ValueError, KeyError, IndexError) as error:
                raise SyntaxError(f"{self.file}:{number}: {text}: {reason(error)} (in {function.name})") from error
        self.code += [f"{function.signature} {{", "[[maybe_unused]] bool carry = false;", *function.body, "}"]
        if function.is_kernel:
            limit = re.search(r"\.maxntid (\d+)", head)
            self.kernels.append(f'{{"{mangled(function.name)}", {function.cpp_name}, {limit[1] if limit else 1024}}},')
        return close


class Function:
    """A kernel, whose parameters lie one behind the other as `params`, or a function, of which each is an array of bytes."""

    def __init__(self, module: Module, head: str):
        self.module = module
        match = re.fullmatch(r"(?:\.visible |\.weak )?\.(entry|func)\s+(?:\((.*?)\)\s*)?([\w$]+)\s*\((.*?)\)(.*)", head.strip())
        if not match:
            raise ValueError("not known")
        kind, result, self.name, parameters, _ = match.groups()
        self.is_kernel = kind == "entry"
        self.cpp_name = f"kernel_{len(module.kernels)}" if self.is_kernel else cpp_name(self.name)
        self.symbols: dict[str, str] = {}
        self.types: dict[str, str] = {}  # of registers
        self.body: list[str] = []
        names, offset = [], 0
        for text in split(result or "") + split(parameters):
            align, size, name = bytes_of(text)
            offset = (offset + align - 1) // align * align
            self.symbols[name] = f"(params + {offset})" if self.is_kernel else cpp_name(name)
            offset += size
            names.append(f"[[maybe_unused]] char* {cpp_name(name)}")
        taken = "[[maybe_unused]] char* params" if self.is_kernel else ", ".join(names)
        self.signature = f"void {self.cpp_name}({taken})"

    def statement(self, text: str, place: str) -> None:
        if text in "{}":
            self.body.append(text)
        elif text.endswith(":"):
            self.body.append(f"{cpp_name(text)};")
        elif text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            # Those of a block inside hide others of their name, as in C++.
            self.declare(TYPES[kind[1:]], [name.strip() for name in names.split(",")])
        elif text.startswith(".shared"):
            self.module.variable(text)
        elif text.startswith((".local", ".param")):
            align, size, name = bytes_of(text)
            self.symbols[name] = cpp_name(name)
            self.body.append(f"alignas({align}) char {cpp_name(name)}[{size}];")
        elif not text.startswith(".pragma"):
            condition = ""
            if match := re.match(r"@(!?)(%\w+) ", text):
                condition, text = f"if ({match[1]}{cpp_name(match[2])}) ", text[match.end() :]
            code = self.instruction(text, place)
            self.body.append(f"{condition}{{ {code} }}" if condition or code.count(";") > 1 else code)

    def declare(self, kind: str, names: list[str]) -> None:
        for name in names:
            if match := re.fullmatch(r"(%\w+)<(\d+)>", name):
                every = [f"{match[1]}{i}" for i in range(1, int(match[2]))]
            else:
                every = [name]
            for register in every:
                if self.types.setdefault(register, kind) != kind:
                    raise ValueError(f"{register} was a {self.types[register]}")
            if every:
                self.body.append(f"[[maybe_unused]] {kind} {', '.join(map(cpp_name, every))};")

    def read(self, operand: str, kind: str) -> str:
        """An operand's value as `kind`; "raw": as what its register is."""
        if operand.startswith("!"):
            return f"!{self.read(operand[1:], kind)}"
        if operand in self.types:
            return cpp_name(operand) if kind in ("raw", self.types[operand]) else f"as<{kind}>({cpp_name(operand)})"
        if match := re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", operand):
            return f"{kind}({match[1]}().{match[2]})"
        if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", operand):
            return f"bit_cast<{kind}>(uint{4 * len(match[1])}_t(0x{match[1]}))"
        if re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)U?", operand):
            return f"{kind}({int(operand.rstrip('U'), 0) % 2**64}u)"
        if operand in self.module.unknown:
            raise ValueError(self.module.unknown[operand])
        return f"as<{kind}>(address_of({(self.module.symbols | self.symbols)[operand]}))"

    def write(self, operand: str, value: str) -> str:
        if operand == "_":  # of no interest
            return f"(void)({value});"
        if operand not in self.types:
            raise ValueError(f"{operand} is no register")
        return f"set({cpp_name(operand)}, {value});"

    def pointer(self, operand: str, space: str) -> str:
        match = re.fullmatch(r"\[ ?([%\w$]+) ?(?:\+ ?(-?\d+))? ?\]", operand)
        if not match:
            raise ValueError(f"{operand} is no address")
        value = self.read(match[1], "uint32_t" if space == "shared" else "uint64_t")
        return f"{'shared_pointer' if space == 'shared' else 'pointer'}({value}, {match[2] or 0})"

    def registers(self, operand: str) -> list[str]:
        return split(operand[1:-1]) if operand.startswith("{") else [operand]

    def instruction(self, text: str, place: str) -> str:
        opcode, _, rest = text.partition(" ")
        base, *modifiers = opcode.split(".")
        operands = split(rest)
        kinds = [TYPES[modifier] for modifier in modifiers if modifier in TYPES]
        name = "_".join([f"op_{base}", *(modifier for modifier in modifiers if modifier not in TYPES)])
        if base == "bra":
            return f"goto {cpp_name(operands[0])};"
        if base == "ret":
            return "return;"
        if base == "call":
            if called := set(operands) & set(self.module.unknown):
                raise ValueError(self.module.unknown[called.pop()])
            result, function, parameters = operands
            return f"{cpp_name(function)}({', '.join(map(cpp_name, split(result[1:-1]) + split(parameters[1:-1])))});"
        if base == "mov" and "{" in rest:
            return self.move_parts(operands, kinds[0])
        if base == "mov" or (base == "cvta" and {"global", "local"} & set(modifiers)):  # whose addresses are generic ones
            return self.write(operands[0], self.read(operands[1], kinds[0]))
        if base in ("ld", "st"):
            return self.load_or_store(base, modifiers, operands, kinds[0], place)
        if base == "membar":
            return f"needle::sim::fence({'false' if 'cta' in modifiers else 'true'});"
        if base == "mma":
            return self.mma(modifiers, operands, kinds, place)
        if base == "ldmatrix":
            return self.ldmatrix(modifiers, operands, place)
        if name not in KNOWN:
            raise ValueError(f"{name} is not in instructions.h")
        if base == "cp" and "shared" in modifiers:
            to, source, *counts = operands
            pointers = [self.pointer(to, "shared"), self.pointer(source, "global")]
            return f"{name}({', '.join([*pointers, *(self.read(count, 'int32_t') for count in counts), place])});"
        if base in ("cp", "bar", "trap"):
            return f"{name}({', '.join([*(self.read(operand, 'int32_t') for operand in operands), place])});"
        result, *inside = operands[0].split("|")
        index, other = OTHER_OPERANDS.get(name, (None, ""))
        space = next((modifier for modifier in modifiers if modifier in SPACES), "")
        values = []
        for i, operand in enumerate(operands[1:]):
            is_address = operand.startswith("[")
            values.append(self.pointer(operand, space) if is_address else self.read(operand, other if i == index else kinds[-1]))
        if "cc" in modifiers or base in ("addc", "subc", "madc"):
            values.append("carry")
        if base in ("atom", "shfl", "vote"):
            values.append(place)
        values += [f"&{cpp_name(register)}" for register in inside]
        return self.write(result, f"{name}<{', '.join(kinds)}>({', '.join(values)})")

    def move_parts(self, operands: list[str], kind: str) -> str:
        """A register into its parts, the lowest first, or parts into a register."""
        to, source = map(self.registers, operands)
        if len(to) > 1:
            parts = [self.write(part, f"part<{i}, {len(to)}>(whole)") for i, part in enumerate(to)]
            return f"const auto whole = {self.read(source[0], kind)}; {''.join(parts)}"
        return self.write(to[0], f"join<{kind}>({', '.join(self.read(part, 'raw') for part in source)})")

    def load_or_store(self, base: str, modifiers: list[str], operands: list[str], kind: str, place: str) -> str:
        space = next((modifier for modifier in modifiers if modifier in SPACES), "")
        if unknown := set(modifiers) - SPACES - {"nc", "volatile", "v2", "v4", modifiers[-1]}:
            raise ValueError(f"{unknown} is not known")
        where, registers = (operands[1], operands[0]) if base == "ld" else operands
        names = self.registers(registers)
        access = f"op_{base}<{kind}, {len(names)}>({self.pointer(where, space)}, {place}"
        if base == "st":
            return f"{access}, {{{', '.join(self.read(name, kind) for name in names)}}});"
        if len(names) == 1:
            return self.write(names[0], f"{access}).value[0]")
        writes = [self.write(name, f"loaded.value[{i}]") for i, name in enumerate(names)]
        return f"const auto loaded = {access}); {''.join(writes)}"

    def mma(self, modifiers: list[str], operands: list[str], kinds: list[str], place: str) -> str:
        *ways, shape, a_order, b_order = (modifier for modifier in modifiers if modifier not in TYPES)
        if [*ways, a_order, b_order] != ["sync", "aligned", "row", "col"]:
            raise ValueError(f"{modifiers} are not known")
        d, a, b, c = map(self.registers, operands)
        code = f"float sums[{len(c)}] = {{{', '.join(self.read(name, 'float') for name in c)}}};"
        for array, names in (("a", a), ("b", b)):
            code += f" const uint32_t {array}[{len(names)}] = {{{', '.join(self.read(name, 'uint32_t') for name in names)}}};"
        code += f" op_mma_{shape}<{', '.join(kinds)}>(sums, a, b, {place}); "
        return code + "".join(self.write(name, f"sums[{i}]") for i, name in enumerate(d))

    def ldmatrix(self, modifiers: list[str], operands: list[str], place: str) -> str:
        to, transposed = self.registers(operands[0]), "trans" in modifiers
        if modifiers != ["sync", "aligned", "m8n8", f"x{len(to)}", *["trans"] * transposed, "shared", "b16"]:
            raise ValueError(f"{modifiers} are not known")
        kinds, row = f"{len(to)}, {str(transposed).lower()}", self.pointer(operands[1], "shared")
        code = f"uint32_t r[{len(to)}]; op_ldmatrix<{kinds}>(r, {row}, {place}); "
        return code + "".join(self.write(name, f"r[{i}]") for i, name in enumerate(to))


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    try:
        module = Module(source)
    except SyntaxError as error:
        sys.exit(f"translate.py: {error}")
    target.write_text("\n".join([
        '#include "cuda_sim/ptx/instructions.h"',
        "namespace needle::sim::ptx {", "namespace {",
        *module.code,
        "const KernelOfPtx kernels[] = {", *module.kernels, "};",
        "[[maybe_unused]] const bool registered = register_kernels(kernels, sizeof kernels / sizeof kernels[0]);",
        "}", "}", "",
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
