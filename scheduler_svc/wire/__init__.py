"""Translation between protobuf messages and the types of core and store."""
