"""Publications as files. A *parcel* is a safetensors directory with one version of the weights, whole or as a delta to
the parcel before it, and a manifest that says what every tensor has to be.

The trainer's first rank packs parcels (`packing`), a folder keeps them (`folder`), and the ranks of an engine check and
read them (`reading`).
"""
