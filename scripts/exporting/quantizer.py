# SPDX-License-Identifier: Apache-2.0
"""Quantize a GGUF with the library of llama-cpp-python: python quantizer.py FROM TO TYPE.

It is not meant to be called by hand. In a process of its own, what the library prints of each
tensor can be kept from the terminal.
"""

import sys


def main() -> None:
    """Quantize, and exit with the library's code: 0 for success."""
    import llama_cpp

    path, outfile, outtype = sys.argv[1:]
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{outtype.upper()}")
    sys.exit(llama_cpp.llama_model_quantize(path.encode(), outfile.encode(), options))


if __name__ == "__main__":
    main()
