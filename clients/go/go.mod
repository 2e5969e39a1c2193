module lapssd

go 1.18
