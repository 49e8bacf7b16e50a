"""What every room uses: locks, storages, schemas, seconds by stage."""
