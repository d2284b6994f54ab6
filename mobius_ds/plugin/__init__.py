"""How DeepSpeed finds Mobius: the import hook, the patches, the launcher."""
