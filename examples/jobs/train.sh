#!/bin/bash
# One script for both worlds: Slurm reads the #SBATCH lines and takes the #SPOTQ lines for comments; spotq reads both.
#SBATCH --job-name=char-lm-script
#SBATCH --time=00:30:00
#SPOTQ --checkpoint-signal=USR1 --checkpoint-profile=rename
#SPOTQ --policy=spot-first --budget=0.50 --retry-failures=1
#SPOTQ --outputs=model.bin

# The first argument of `spotq submit train.sh STEPS` is the number of steps.
exec spotq train --steps "${1:-2000}" --step-ms 20 --out model.bin
