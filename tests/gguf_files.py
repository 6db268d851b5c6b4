# SPDX-License-Identifier: Apache-2.0
"""GGUF files with faults, made from one without."""

import gguf
import numpy as np


def rewrite(path, output, fields):
    """Copy a GGUF with other values.

    Args:
        fields: {key: new value; None leaves the key out}.
    """
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        value = field.contents()
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = fields.get(key, value)
        if value is not None:
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output
